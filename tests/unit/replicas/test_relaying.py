"""Requests whose replicas die, by scripted replicas without sockets.

The guarded bugs: what a replica sent of a step that is not whole reaches the client, an error of
the client's sends its request round all replicas, a replica that hangs keeps its requests for ever.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from foretoken.replicas.members import Members, ReplicaPlace
from foretoken.replicas.relaying import (
    Asked,
    FrontMetrics,
    RelayedAnswer,
    RelayedRequests,
    RelayParts,
)
from foretoken.server.problems import Problem
from foretoken.server.replica_protocol.pace import Backlog, Paces
from foretoken.server.replica_protocol.progress import StreamProgress, mark
from foretoken.server.replica_protocol.report import PATH, Report
from tests.unit.router_fakes import HERE, prompt

BODY = b'{"prompt": "x"}\n'
DONE = b"data: [DONE]\n\n"
Piece = bytes | httpx.HTTPError | float


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"text": text}).encode() + b"\n\n"


def step(text: str, *ids: int, end: str | None = None, choice: int = 0) -> bytes:
    return event(text) + mark([StreamProgress(choice, ids, end)])


def error(kind: str) -> bytes:
    body = {"error": {"type": kind, "message": "so it is"}}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


NAMES = ("a", "b")
DIED = httpx.ReadError("reset")


@dataclass
class Scripted(httpx.AsyncByteStream):
    """Pieces of an answer; an error is raised, a number is waited for in seconds."""

    pieces: Sequence[Piece]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, bytes):
                yield piece
            elif isinstance(piece, float):
                await asyncio.sleep(piece)
            else:
                raise piece


@dataclass
class Cluster:
    """Two replicas: answers, given in turn whoever is asked, and who was asked what."""

    scripts: list[Any]
    """Pieces of a stream, or a whole response."""
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    unread: dict[str, int] = field(default_factory=dict)
    """Prompt tokens that a replica has not read."""

    def __post_init__(self) -> None:
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.members = Members(self._directory, self.client, "key")
        self.requests = RelayedRequests()
        self.metrics = FrontMetrics("ours")

    async def _directory(self) -> list[ReplicaPlace]:
        return [ReplicaPlace(name, f"http://{name}") for name in NAMES]

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        name = request.url.host
        if request.url.path == PATH:
            report = Report(
                fingerprint=(HERE.build, HERE.precision, HERE.kernels),
                queued=0, running=0, kv_use=0.0,
                backlog=Backlog(1, self.unread.get(name, 0), 0.0), paces=Paces(0.0, 0.01, 0.0),
                draining=False,
                alive=True, stalled_s=0.0, kv_tokens=99, model="m", speculation="off",
            )  # fmt: skip
            return httpx.Response(200, json=report.model_dump())
        self.asked.append((name, json.loads(request.content)))
        script = self.scripts.pop(0)
        if isinstance(script, httpx.Response):
            return script
        return httpx.Response(200, stream=Scripted(script))

    async def run(self, work: Callable[[RelayedAnswer], Awaitable[Any]], **asked: Any) -> Any:
        """Do something with one answer."""
        watching = asyncio.create_task(self.members.run())
        while len(self.members.views) < len(NAMES):
            await asyncio.sleep(0.01)
        given: dict[str, Any] = {
            "request_id": "r", "path": "/v1/completions", "body": BODY, "headers": {},
            "prompt": prompt([1]), "choices": 1, "repeatable": True,
            "deadline": asyncio.get_running_loop().time() + 30.0,
        }  # fmt: skip
        parts = RelayParts(
            members=self.members, client=self.client, metrics=self.metrics, requests=self.requests
        )
        answer = RelayedAnswer(Asked(**{**given, **asked}), parts)
        try:
            return await work(answer)
        finally:
            await answer.close()
            watching.cancel()
            assert self.requests.num_open == 0


async def read(answer: RelayedAnswer) -> bytes:
    await answer.begin()
    return b"".join([part async for part in answer.events()])


def streamed(cluster: Cluster, **asked: Any) -> bytes:
    found: bytes = asyncio.run(cluster.run(read, **asked))
    return found


@pytest.mark.slow
def test_half_a_step_reaches_nobody() -> None:
    """The beginning of a step comes again at another replica, from its first token."""
    whole = step("b", 6, 7)
    for cut in range(len(whole)):
        first = [step("a", 5), whole[:cut], DIED]
        rest = [step("b", 6, 7), step("c", 8, end="length"), DONE]
        cluster = Cluster([first, rest])
        assert streamed(cluster) == event("a") + event("b") + event("c"), cut
        (one, begun), (other, resumed) = cluster.asked
        assert {one, other} == {"a", "b"} and begun == {"prompt": "x"}
        assert resumed == {"prompt": "x", "resume": [{"output_ids": [5], "ended": False}]}


def test_a_choice_that_has_ended_stays_ended() -> None:
    first = [step("a", 5, end="stop", choice=1), step("b", 6), DIED]
    rest = [step("c", 7, end="stop"), DONE]
    cluster = Cluster([first, rest])
    assert streamed(cluster, choices=2) == event("a") + event("b") + event("c")
    assert cluster.asked[1][1]["resume"] == [
        {"output_ids": [6], "ended": False},
        {"output_ids": [5], "ended": True},
    ]


@pytest.mark.parametrize("first", [[DIED], [event("a"), DIED], [DONE], []])
def test_what_has_not_begun_is_begun_again(first: list[Piece]) -> None:
    rest = [step("a", 5, end="stop"), DONE]
    cluster = Cluster([first, rest])
    assert streamed(cluster, repeatable=False) == event("a")
    assert [body for _, body in cluster.asked] == [{"prompt": "x"}] * 2


def test_without_a_seed_the_client_is_told() -> None:
    first, rest = [step("a", 5), DIED], [step("b", 6, end="stop"), DONE]
    cluster = Cluster([first, rest])
    found = streamed(cluster, repeatable=False)
    assert found.startswith(event("a") + b": ") and found.endswith(b"\n\n" + event("b"))
    assert b"in distribution" in found


def test_whose_fault_an_error_is_decides_who_hears_of_it() -> None:
    rest = [step("b", 6, end="stop"), DONE]
    for kind in ("internal_server_error", "service_unavailable_error"):
        first = [step("a", 5), error(kind), DONE]
        cluster = Cluster([first, rest])
        assert streamed(cluster) == event("a") + event("b")
    first = [step("a", 5), error("invalid_request_error"), DONE]
    cluster = Cluster([first])
    assert streamed(cluster) == event("a") + error("invalid_request_error")


def test_a_whole_answer_needs_no_last_word() -> None:
    first = [step("a", 5, end="stop"), DIED]
    assert streamed(Cluster([first])) == event("a")


def test_a_replica_that_says_nonsense_has_failed() -> None:
    rest = [step("a", 5, end="stop"), DONE]
    for nonsense in (b": progress [[0\n\n", mark([StreamProgress(4, (5,), None)])):
        cluster = Cluster([[nonsense], rest])
        assert streamed(cluster) == event("a")


def refusal(status: int, message: str = "no") -> httpx.Response:
    body = {"error": {"message": message, "param": "n", "code": status}}
    return httpx.Response(status, json=body, headers={"retry-after": "7"})


def test_a_wrong_request_is_wrong_everywhere() -> None:
    cluster = Cluster([refusal(400)])
    with pytest.raises(Problem) as caught:
        streamed(cluster)
    assert (caught.value.status, caught.value.message, caught.value.param) == (400, "no", "n")
    assert len(cluster.asked) == 1


def test_a_full_replica_is_not_the_last_word() -> None:
    rest = [step("a", 5, end="stop"), DONE]
    cluster = Cluster([refusal(429), rest])
    assert streamed(cluster) == event("a") and len(cluster.asked) == 2
    cluster = Cluster([refusal(429), refusal(429)])
    with pytest.raises(Problem) as caught:
        streamed(cluster)
    assert caught.value.status == 429 and caught.value.headers == {"retry-after": "7"}
    assert {name for name, _ in cluster.asked} == {"a", "b"}


def test_nobody_can_go_on_with_what_another_began() -> None:
    first = [step("a", 5), DIED]
    cluster = Cluster([first, refusal(400)])
    with pytest.raises(Problem, match="broke off") as caught:
        streamed(cluster)
    assert caught.value.status == 500


def test_a_replica_that_hangs_is_left() -> None:
    """It is told by whoever watches over replicas: no connection ends."""
    first = [step("a", 5), 60.0]
    rest = [step("b", 6, end="stop"), DONE]
    cluster = Cluster([first, rest])

    async def work(answer: RelayedAnswer) -> bytes:
        reading = asyncio.create_task(read(answer))
        await asyncio.sleep(0.1)
        [(hung, _)] = cluster.asked
        [lose] = cluster.members._members[hung].listeners
        lose()
        return await asyncio.wait_for(reading, 5)

    assert asyncio.run(cluster.run(work)) == event("a") + event("b")


def test_a_draining_front_ends_what_it_has() -> None:
    cluster = Cluster([[step("a", 5), 60.0]])

    async def work(answer: RelayedAnswer) -> bytes:
        reading = asyncio.create_task(read(answer))
        await asyncio.sleep(0.1)
        cluster.requests.end_all()
        return await asyncio.wait_for(reading, 5)

    with pytest.raises(Problem) as caught:
        asyncio.run(cluster.run(work))
    assert caught.value.code == "draining"


def test_an_answer_in_one_piece_comes_from_one_replica() -> None:
    cluster = Cluster([[b'{"te', DIED], [b'{"text":1}']])
    found = asyncio.run(cluster.run(lambda answer: answer.whole()))
    assert found == b'{"text":1}' and len(cluster.asked) == 2


def test_the_busy_one_is_passed_by() -> None:
    rest = [step("a", 5, end="stop"), DONE]
    for busy in "ab":
        cluster = Cluster([rest], unread={busy: 900})
        streamed(cluster)
        assert [name for name, _ in cluster.asked] == ["b" if busy == "a" else "a"]
