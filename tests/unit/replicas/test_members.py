"""Who may be asked: replicas that fall silent, hang, come back.

The guarded bugs: a request that waits for ever for a machine that is gone, a replica that is chosen
though its engine stands still, prefixes of a replica that has forgotten them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from foretoken.replicas import members as module
from foretoken.replicas.members import Members, ReplicaPlace
from foretoken.router.view import RouteNeeds
from foretoken.server.replica_protocol.pace import Backlog, Paces
from foretoken.server.replica_protocol.report import Report
from tests.unit.router_fakes import HERE, prompt

LOST_S = 0.3


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKED_EVERY_S", 0.01)
    monkeypatch.setattr(module, "FOUND_EVERY_S", 0.01)
    monkeypatch.setattr(module, "LOST_S", LOST_S)


class Told:
    def __init__(self, **given: Any) -> None:
        self.answers = True
        self.given = given
        self.others: dict[str, dict[str, Any]] = {}
        """What replicas say that are not as given, by their names."""
        self.places = [ReplicaPlace("a", "http://a")]
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        self.members = Members(self._directory, self.client, "key")

    async def _directory(self) -> list[ReplicaPlace]:
        return self.places

    def _answer(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["x-foretoken-internal-key"] == "key"
        if not self.answers:
            raise httpx.ConnectError("refused")
        given: dict[str, Any] = {
            "fingerprint": tuple(HERE), "alive": True,
            "backlog": Backlog(0, 0, 0.0), "paces": Paces(0.0, 0.01, 0.0), "draining": False,
            "stalled_s": 0.0, "speculation": "off",
        }  # fmt: skip
        own = self.others.get(request.url.host, self.given)
        return httpx.Response(200, json=Report(**{**given, **own}).model_dump())

    async def until(self, wanted: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not wanted():
                await asyncio.sleep(0.005)

    def watched(self, work: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            watching = asyncio.create_task(self.members.run())
            await self.until(lambda: bool(self.members.views))
            await work()
            watching.cancel()

        asyncio.run(run())


def test_a_silent_replica_is_not_chosen_and_then_lost() -> None:
    told, lost = Told(), []
    members = told.members

    async def work() -> None:
        beginning = prompt(range(8))
        members.choose(beginning, RouteNeeds())
        assert members.choose(beginning, RouteNeeds()).route.hit_tokens > 0
        members.listen("a", lambda: lost.append("a"))
        forget = members.listen("a", lambda: lost.append("no more"))
        forget()
        told.answers = False
        await told.until(lambda: not members.views)
        assert members.choose(beginning, RouteNeeds()).route.replica is None and not lost
        await told.until(lambda: bool(lost))
        assert lost == ["a"]
        members.listen("a stranger", lambda: lost.append("at once"))()
        assert lost == ["a", "at once"]
        told.answers = True
        await told.until(lambda: bool(members.views))
        assert members.choose(beginning, RouteNeeds()).route.hit_tokens == 0, "it holds nothing now"

    told.watched(work)


@pytest.mark.parametrize("given", [{"stalled_s": 61.0}, {"alive": False, "stalled_s": 61.0}])
def test_an_engine_that_stands_still_is_as_silent(given: dict[str, Any]) -> None:
    told = Told()

    async def work() -> None:
        gone = asyncio.Event()
        told.members.listen("a", gone.set)
        told.given = given
        async with asyncio.timeout(5):
            await gone.wait()

    told.watched(work)


def test_one_that_drains_or_is_lost_takes_nothing_new() -> None:
    for given in ({"draining": True}, {"alive": False}):
        told = Told(**given)

        async def work(told: Told = told) -> None:
            assert told.members.choose(prompt([1]), RouteNeeds()).route.replica is None

        told.watched(work)


def test_who_failed_somebody_is_asked_first() -> None:
    told = Told()

    async def work() -> None:
        told.members.doubt("a")
        assert not told.members.views
        loop = asyncio.get_running_loop()
        assert await told.members.changed(loop.time() + 5)
        assert told.members.views and not await told.members.changed(loop.time() - 1)

    told.watched(work)


def test_what_was_given_counts_until_it_is_settled_or_reported() -> None:
    """Two requests at once do not go to the one that was idle last; one after the other do."""
    told = Told()

    async def work() -> None:
        members = told.members
        first = members.choose(prompt(range(100)), RouteNeeds())
        second = members.choose(prompt(range(100, 150)), RouteNeeds())
        [view] = members.views
        assert view.queue_s == pytest.approx(1.5)
        first.settle()
        first.settle()
        [view] = members.views
        assert view.queue_s == pytest.approx(0.5)
        await told.until(lambda: members.views[0].queue_s == 0.0)
        second.settle()

    told.watched(work)


def test_a_report_from_the_middle_of_an_answer_is_not_believed_after_its_end() -> None:
    """Whoever asks again at once goes to the replica that has the conversation, which is idle."""
    told = Told(backlog=Backlog(open=2, unread_tokens=50, turns=0.0))

    async def work() -> None:
        members = told.members
        first = members.choose(prompt(range(100)), RouteNeeds())
        second = members.choose(prompt(range(50)), RouteNeeds())
        given_s = members.views[0].queue_s
        await told.until(lambda: members.views[0].queue_s < given_s)
        busy_s = members.views[0].queue_s
        first.end()
        first.end()
        half_s = members.views[0].queue_s
        second.end()
        assert busy_s > half_s > members.views[0].queue_s == 0.0

    told.watched(work)


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    """Else whoever sends what is refused at no cost makes the front forget what others have."""
    told = Told()

    async def work() -> None:
        members = told.members
        members.choose(prompt(range(8)), RouteNeeds())
        longer = prompt(range(40))
        members.choose(longer, RouteNeeds()).refuse()
        assert members.choose(longer, RouteNeeds()).route.hit_tokens == 8

    told.watched(work)


def test_a_new_replica_is_not_taken_for_an_idle_one() -> None:
    """It has measured nothing yet; what others of its kind have measured holds for it."""
    told = Told(paces=Paces(0.5, 0.02, 3.0), backlog=Backlog(1, 100, 0.0))

    async def work() -> None:
        told.places = [ReplicaPlace("a", "http://a"), ReplicaPlace("b", "http://b")]
        told.others = {"b": {"paces": Paces(0.0, 0.0, 0.0), "backlog": Backlog(5, 200, 0.5)}}
        await told.until(lambda: len(told.members.views) == 2)
        old, new = sorted(told.members.views, key=lambda view: view.replica_id)
        assert (old.prefill_token_s, new.prefill_token_s) == (0.02, 0.02)
        assert old.queue_s == pytest.approx(0.5 + 100 * 0.02)
        assert new.queue_s == pytest.approx(0.5 + 200 * 0.02 + 0.5 * 3.0)

    told.watched(work)
