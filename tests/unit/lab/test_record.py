"""The recording proxy never breaks what it passes, and writes down all of it that it may."""

import asyncio
import gc
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from foretoken.lab.http.read_answer import parse_events
from foretoken.lab.http.timed import Answer, HttpPool, Incoming, TransportError
from foretoken.lab.measure.workload import load_workload
from foretoken.lab.records.proxy import Prompts, RecordingProxy
from foretoken.lab.records.run_files import LineWriter, redact_secrets, redact_word
from tests.mock_server.faults import MockFaults
from tests.mock_server.generator import MockLaw
from tests.mock_server.server import MockServer, mock_running

LAW = MockLaw(step_s=0.002, prefill_s=0.002, k=3, alpha=0.7, seed=1)
BODY: dict[str, Any] = {"prompt": "my key is sk-abcdefghijklmnop1234", "max_tokens": 9,
                        "temperature": 0.0, "stream": True, "min_p": 0.1}  # fmt: skip


def ask(url: str, body: dict[str, Any], **headers: str) -> Answer:
    """One request."""

    async def main() -> Answer:
        pool = HttpPool(url, headers={"authorization": "Bearer sk-secret-of-the-client", **headers})
        data = json.dumps(body).encode()
        answer = await pool.send("POST", "/v1/completions", data, timeout_s=60.0)
        await pool.close()
        return answer

    return asyncio.run(main())


@contextmanager
def recording(
    upstream: str, file: Path, prompts: Prompts = "hash"
) -> Iterator[tuple[str, RecordingProxy]]:
    """A proxy that runs before `upstream`, and its URL."""
    writer = LineWriter(file)
    proxy = RecordingProxy(upstream, writer, prompts)
    with mock_running(proxy) as front:
        yield front, proxy
    writer.close()


def record(
    tmp_path: Path,
    body: dict[str, Any],
    faults: MockFaults | None = None,
    prompts: Prompts = "keep",
) -> tuple[Answer, Answer, list[dict[str, Any]]]:
    """A request to a mock, the same through the proxy, and the recorded lines."""
    path = tmp_path / "recorded.jsonl"
    path.unlink(missing_ok=True)
    with mock_running(MockServer(LAW, faults=faults)) as upstream:
        with recording(upstream, path, prompts) as (front, _):
            direct = ask(upstream, body)
            through = ask(front, body, **{"x-class": "code", "x-tenant": "t1"})
    return direct, through, [json.loads(line) for line in path.read_text().splitlines()]


def texts(answer: Answer) -> tuple[str, list[str], bool]:
    """Text, keys of the last event, and whether it ended well."""
    events, done = parse_events(answer.pieces)
    text = "".join(c["text"] for _, e in events for c in e["choices"])
    return text, sorted(events[-1][1]), done


def test_a_stream_passes_and_is_recorded(tmp_path: Path) -> None:
    direct, through, lines = record(tmp_path, BODY)
    assert through.status == 200 and through.broken is None
    assert texts(through)[0] == texts(direct)[0]
    assert texts(through)[2]
    assert "usage" in texts(direct)[1], "the mock sends it always"
    assert "usage" not in texts(through)[1], "not asked for, so taken out"
    (line,) = lines
    assert line["prompt"] == "my key is [redacted]"
    assert line["parameters"] == {"min_p": 0.1}
    assert line["category"] == "code"
    assert line["observed"]["tags"]["tenant"] == "t1"
    assert line["observed"]["acceptance"]["num_drafted"] > 0
    assert line["observed"]["output_tokens"] == 9
    assert "secret" not in json.dumps(lines)


class OneByOne:
    """An upstream that sends a piece only when the client has seen the one before."""

    def __init__(self) -> None:
        self.seen = threading.Semaphore(1)
        self.waited: list[bool] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await MockServer(LAW)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for n in range(4):
            self.waited.append(await asyncio.to_thread(self.seen.acquire, True, 30.0))
            event = json.dumps({"choices": [{"text": f"{n}", "index": 0}]}).encode()
            await send({"type": "http.response.body", "body": b"data: " + event + b"\n\n",
                        "more_body": True})  # fmt: skip
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_pieces_pass_as_they_come(tmp_path: Path) -> None:
    upstream = OneByOne()

    async def main(url: str) -> list[bytes]:
        pool, incoming, pieces = HttpPool(url), Incoming(), []
        data = json.dumps(BODY).encode()
        asking = asyncio.create_task(
            pool.send("POST", "/v1/completions", data, timeout_s=200.0, incoming=incoming)
        )
        async for piece in incoming.pieces():
            pieces.append(piece)
            upstream.seen.release()
        await asking
        await pool.close()
        return pieces

    with mock_running(upstream) as behind, recording(behind, tmp_path / "r.jsonl") as (front, _):
        pieces = asyncio.run(main(front))
    assert upstream.waited == [True] * 4, "a piece was held back"
    assert len(pieces) == 4


def test_usage_stays_where_it_was_asked_for(tmp_path: Path) -> None:
    body = {**BODY, "stream_options": {"include_usage": True}}
    _, through, _ = record(tmp_path, body)
    assert "usage" in texts(through)[1]


@pytest.mark.parametrize("prompts", ["hash", "none"])
def test_prompts_need_not_be_kept(tmp_path: Path, prompts: Prompts) -> None:
    _, _, (line,) = record(tmp_path, BODY, prompts=prompts)
    assert "prompt" not in line and "my key" not in json.dumps(line)
    assert bool(line["prompt_hash"]) == (prompts == "hash")


@pytest.mark.slow
def test_parameters_tell_no_secrets_and_no_texts(tmp_path: Path) -> None:
    """What comes after a hole to fill is as private as what comes before it."""
    body = {**BODY, "suffix": "private words", "stop": ["sk-abcdefghijklmnop1234"]}
    _, _, (line,) = record(tmp_path, body, prompts="hash")
    assert line["parameters"] == {"min_p": 0.1, "stop": ["[redacted]"]}
    _, _, (line,) = record(tmp_path, body, prompts="keep")
    assert line["parameters"]["suffix"] == "private words"


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    record(tmp_path, BODY, prompts="hash")
    (item,), _ = load_workload(tmp_path / "recorded.jsonl")
    assert len(item.prompt.split()) == 4, "as many words as the prompt had tokens"
    assert (item.max_tokens, item.temperature, item.category) == (9, 0.0, "code")
    assert item.arrival_s is not None and item.parameters == {"min_p": 0.1}


def test_an_answer_that_is_not_streamed_passes_unchanged(tmp_path: Path) -> None:
    direct, through, lines = record(tmp_path, {**BODY, "stream": False})
    one, other = json.loads(direct.body), json.loads(through.body)
    assert one["choices"] == other["choices"]
    assert lines[0]["observed"]["output_tokens"] == 9


@pytest.mark.slow
def test_errors_and_broken_streams_pass_as_they_are(tmp_path: Path) -> None:
    _, through, lines = record(tmp_path, BODY, MockFaults(refuse=("min_p",)))
    assert through.status == 400 and b"min_p is not supported" in through.body
    assert lines[0]["observed"]["error"].startswith("refused")
    _, through, lines = record(tmp_path, BODY, MockFaults(truncate_every=2))
    assert through.broken is not None, "a cut stream must not look whole"
    (line,) = lines
    assert line["observed"]["error"].startswith("truncated")
    assert line["observed"]["ttft_s"] > 0 and line["arrival_s"] > 0, "arrivals of failures count"


def test_a_missing_upstream_is_a_502(tmp_path: Path) -> None:
    with recording("http://127.0.0.1:9", tmp_path / "r.jsonl") as (front, _):
        answer = ask(front, BODY)
    assert answer.status == 502 and b"upstream" in answer.body
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert line["observed"]["status"] is None
    assert line["observed"]["error"].startswith("connection")


def recorded_of(
    server: MockServer, leave: Callable[[str], Coroutine[Any, Any, None]], file: Path
) -> dict[str, Any]:
    """What is written down of a client of the proxy before `server` that leaves."""
    with mock_running(server) as upstream, recording(upstream, file) as (front, proxy):
        asyncio.run(leave(front))
        while not proxy.recorded:
            time.sleep(0.005)
    line: dict[str, Any] = json.loads(file.read_text())
    return line


@pytest.mark.slow
def test_a_client_that_leaves_is_recorded_with_what_it_got(tmp_path: Path) -> None:
    law = MockLaw(step_s=0.02, prefill_s=0.0)

    async def leave(url: str) -> None:
        pool, incoming = HttpPool(url), Incoming()
        data = json.dumps({**BODY, "max_tokens": 10_000}).encode()
        asking = asyncio.create_task(
            pool.send("POST", "/v1/completions", data, timeout_s=200.0, incoming=incoming)
        )
        async for _ in incoming.pieces():
            asking.cancel()
        assert asking.cancelled() or await asyncio.wait([asking])

    line = recorded_of(MockServer(law), leave, tmp_path / "r.jsonl")
    assert line["observed"]["error"].startswith("left")
    assert line["observed"]["ttft_s"] > 0 and line["max_tokens"] == 10_000


@pytest.mark.slow
def test_a_client_that_leaves_before_its_answer_is_recorded(tmp_path: Path) -> None:
    async def leave(url: str) -> None:
        pool = HttpPool(url)
        with pytest.raises(TransportError, match="timeout"):
            await pool.send("POST", "/v1/completions", json.dumps(BODY).encode(), timeout_s=0.2)
        await pool.close()

    hanging = MockServer(LAW, faults=MockFaults(hang_every=1))
    observed = recorded_of(hanging, leave, tmp_path / "r.jsonl")["observed"]
    assert observed["status"] is None and observed["error"].startswith("left")


def test_an_upstream_that_closes_after_every_stream(tmp_path: Path) -> None:
    """As llama.cpp does, though its answers promise to keep the connection."""
    event = b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    head += b"transfer-encoding: chunked\r\nkeep-alive: timeout=5\r\n\r\n"
    answer = head + b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event)
    with answering([answer] * 4) as upstream:
        with recording(upstream, tmp_path / "r.jsonl") as (front, proxy):
            answers = [ask(front, BODY) for _ in range(4)]
    assert [answer.status for answer in answers] == [200] * 4
    assert all(answer.broken is None and answer.body == event for answer in answers)
    assert (proxy.recorded, proxy.lost) == (4, 0)


@contextmanager
def answering(answers: list[bytes]) -> Iterator[str]:
    """A server that answers each connection once and closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in answers:
                connection, _ = server.accept()
                with connection:
                    request = b""
                    while not request.endswith((b"}", b"\r\n\r\n")):
                        piece = connection.recv(65536)
                        assert piece, "closed before it asked"
                        request += piece
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_timings_stay_where_the_client_would_have_had_them(tmp_path: Path) -> None:
    """llama.cpp moves them into the usage event, which is only there for the recording."""
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"completion_tokens": 1}, "timings": {"draft_n": 4,
         "draft_n_accepted": 3}},
    ]  # fmt: skip
    frames = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events]
    body = b"".join(frames) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    answer = head + b"content-length: %d\r\n\r\n" % len(body) + body
    with answering([answer]) as upstream:
        with recording(upstream, tmp_path / "r.jsonl") as (front, _):
            through = ask(front, BODY)
    found, done = parse_events(through.pieces)
    assert done and [event for _, event in found] == [
        events[0], {**events[1], "timings": events[2]["timings"]},
    ]  # fmt: skip
    line = json.loads((tmp_path / "r.jsonl").read_text())
    assert line["observed"]["acceptance"]["num_accepted"] == 3


def test_what_is_no_answer_yet_is_not_passed_on(tmp_path: Path) -> None:
    """100 before the answer; and the answer to HEAD has lengths but no body."""
    late = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"
    empty = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\nx-it: is\r\n\r\n"

    async def main(url: str) -> tuple[Answer, Answer]:
        pool = HttpPool(url)
        data = json.dumps({**BODY, "stream": False}).encode()
        first = await pool.send(
            "POST", "/v1/completions", data, timeout_s=60.0, headers={"expect": "100-continue"}
        )
        second = await pool.send("HEAD", "/v1/models", timeout_s=60.0)
        await pool.close()
        return first, second

    with answering([late, empty]) as upstream:
        with recording(upstream, tmp_path / "r.jsonl") as (front, _):
            first, second = asyncio.run(main(front))
    assert (first.status, first.body) == (200, b"{}")
    assert (second.status, second.body, dict(second.headers)["x-it"]) == (200, b"", "is")


def test_a_full_disk_does_not_stop_the_traffic() -> None:
    with mock_running(MockServer(LAW)) as upstream:
        with recording(upstream, Path("/dev/full")) as (front, proxy):
            assert [ask(front, BODY).status for _ in range(2)] == [200, 200]
    assert proxy.lost == 2


@pytest.mark.parametrize(
    ("take_out", "text", "left"),
    [
        (redact_secrets, "use sk-proj-abcdefghijklmnop please", "use [redacted] please"),
        (redact_secrets, "Authorization: Bearer abcdefghijklmnop.qr", "Authorization: [redacted]"),
        (redact_secrets, "password = hunter2222 ok", "[redacted] ok"),
        (redact_secrets, "a task of skill", "a task of skill"),
        (redact_word, "sk-short", "[redacted]"),
        (redact_word, "--api-key=abc", "--api-key=[redacted]"),
        (redact_word, "vllm serve x --hf-token hf_abcdefghijklmnopqrstuv",
         "vllm serve x --hf-token [redacted]"),
        (redact_word, "--max-tokens=128", "--max-tokens=128"),
    ],
)  # fmt: skip
def test_secrets_are_taken_out_of_texts_and_of_words_however_short(
    take_out: Callable[[str], str], text: str, left: str
) -> None:
    assert take_out(text) == left


@pytest.mark.slow
def test_the_command_says_what_it_recorded_when_it_is_stopped(tmp_path: Path) -> None:
    out = tmp_path / "recorded.jsonl"
    command = [sys.executable, "-m", "foretoken", "lab", "record", "http://127.0.0.1:9", "--json"]
    command += ["--port", "0", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stderr is not None
        url = run.stderr.readline().decode().split()[0]
        assert ask(url, BODY).status == 502
        run.send_signal(signal.SIGTERM)
        said = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert json.loads(said[0]) == {"file": str(out), "recorded": 1, "lost": 0}
    assert len(out.read_text().splitlines()) == 1


async def _endless(_: Request) -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield bytes(65536)

    return StreamingResponse(pieces())


@pytest.mark.slow
def test_the_end_leaves_no_connection_open() -> None:
    """A client that reads nothing keeps the server from ending its answer in order."""
    left: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, lambda found: left.append(found.exc_value)
    try:
        with mock_running(Starlette(routes=[Route("/", _endless)])) as url:
            client = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
            client.sendall(b"GET / HTTP/1.1\r\nHost: mock\r\n\r\n")
            assert client.recv(1)
        gc.collect()
        client.close()
    finally:
        sys.unraisablehook = before
    assert not left, left
