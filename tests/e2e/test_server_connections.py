"""What a connection may do before anything is known of it, seen from raw sockets, and how the
server stops: nobody it accepted is left without a reason."""

import json
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.lab.measure.servers import free_port
from foretoken.server.settings import Limits, ServerConfig
from foretoken.server.transport.draining_server import MOST_HEAD_BYTES, MOST_HEADERS
from foretoken.types import FinishReason, Output
from tests.e2e.serving import Serving, connect, serving, start_server

PATIENCE_S = 1.0
ROOM = 8
SHORT = {"prompt": [1, 2, 3], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
LONG = {**SHORT, "max_tokens": 2000}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Impatient, and with little room."""
    from foretoken.testing import write_tiny_llama

    folder = write_tiny_llama(
        tmp_path_factory.mktemp("model"), max_position_embeddings=4096, vocab_size=97
    )
    config = EngineConfig.from_kwargs(model=str(folder), kv_cache_memory_bytes=8 << 20)
    limits = Limits(client_timeout_s=PATIENCE_S, max_connections=ROOM, max_body_bytes=20_000)
    settings = ServerConfig(api_keys=("key",), limits=limits)
    with serving(build_engine(config), settings) as running:
        yield running


def prompt_client(server: Serving) -> socket.socket:
    client = connect(server.url)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def head(length: int, *more: str, path: str = "/v1/completions", key: str = "key") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}",
             "content-type: application/json", f"content-length: {length}", *more]  # fmt: skip
    return "\r\n".join([*lines, "", ""]).encode()


def asking(body: Any, *more: str) -> bytes:
    raw = json.dumps(body).encode()
    return head(len(raw), *more) + raw


def read_all(client: socket.socket) -> bytes:
    found = b""
    while piece := client.recv(65536):
        found += piece
    return found


def error_of(answer: bytes) -> tuple[int, Any]:
    start, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id" in start and b"connection: close" in start
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code", "request_id"} <= error.keys()
    return int(start.split()[1]), error


def wait_alone(server: Serving, seconds: float = 20) -> None:
    until = time.monotonic() + seconds
    while server.runner.server_state.connections:
        assert time.monotonic() < until, server.runner.server_state.connections
        time.sleep(0.02)


@pytest.mark.parametrize("size", [2 * MOST_HEAD_BYTES, 20 << 20])
@pytest.mark.parametrize("start", [b"GET /health HTTP/1.1\r\nhost: ", b"GET /"])
def test_a_large_head_is_not_kept(server: Serving, start: bytes, size: int) -> None:
    with prompt_client(server) as client:
        client.sendall(start + b"a" * size)
        status, error = error_of(read_all(client))
        assert status == 431 and str(MOST_HEAD_BYTES) in error["message"]


def test_many_headers_are_too_many(server: Serving) -> None:
    with prompt_client(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MOST_HEADERS + 1) + b"\r\n")
        assert error_of(read_all(client))[0] == 431
    with prompt_client(server) as client:
        some = b"a: b\r\n" * (MOST_HEADERS - 1)
        client.sendall(b"GET /health HTTP/1.1\r\nconnection: close\r\n" + some + b"\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 200")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"\r\n", None),
        (b"GET /health HTTP/1.1\r\nhost", 408),
        (head(100), 408),
        (head(100) + b"{", 408),
        (head(100, "expect: 100-continue"), 408),
        (head(100, key="wrong"), 401),
    ],
)
def test_who_sends_too_slowly_is_not_waited_for(
    server: Serving, sent: bytes, status: int | None
) -> None:
    with prompt_client(server) as client:
        client.sendall(sent)
        answer = read_all(client).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert (int(answer.split()[1]) if answer else None) == status
        if status == 408:
            assert error_of(answer)[1]["type"] == "timeout_error"
    wait_alone(server)


@pytest.mark.slow
def test_dripping_does_not_buy_time(server: Serving) -> None:
    """Whatever is dripped: blank lines, a head, a body, a body that was refused."""
    starts = [b"\r\n", b"GET / HTTP/1.1\r\na: ", head(10_000), head(10_000, key="wrong")]
    with ExitStack() as stack:
        clients = [stack.enter_context(prompt_client(server)) for _ in starts]
        for client, start in zip(clients, starts, strict=True):
            client.sendall(start)
        until = time.monotonic() + 20 * PATIENCE_S
        while server.runner.server_state.connections:
            assert time.monotonic() < until
            for client, start in zip(clients, starts, strict=True):
                try:
                    client.sendall(b"\r\n" if start == b"\r\n" else b"a")
                except OSError:
                    pass
            time.sleep(0.05)


@pytest.mark.slow
def test_half_open_connections_do_not_lock_others_out(server: Serving) -> None:
    with ExitStack() as stack:
        for number in range(10 * ROOM):
            client = stack.enter_context(prompt_client(server))
            client.sendall([b"GET /health HT", head(100) + b"{", b""][number % 3])
            if number % ROOM == 0:
                assert httpx.get(server.url + "/health", timeout=30).status_code == 200
        assert len(server.runner.server_state.connections) <= ROOM + 2
    wait_alone(server)


def test_who_is_being_answered_keeps_the_room(server: Serving) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(prompt_client(server)) for _ in range(ROOM)]
        for client in busy:
            client.sendall(asking({**LONG, "stream": True}))
            assert client.recv(100)
        late = stack.enter_context(prompt_client(server))
        late.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        status, error = error_of(read_all(late))
        assert status == 503 and "connections" in error["message"]
        assert all(client.recv(100) for client in busy)
    server.wait_idle()
    wait_alone(server)


@pytest.mark.parametrize("how", ["length", "chunked"])
@pytest.mark.parametrize(("key", "status"), [("key", 413), ("wrong", 401)])
def test_a_body_that_is_refused_is_not_reset(
    server: Serving, how: str, key: str, status: int
) -> None:
    size = 8 << 20
    start = head(size, "connection: close", key=key)
    body = b" " * size
    if how == "chunked":
        start = start.replace(f"content-length: {size}".encode(), b"transfer-encoding: chunked")
        body = f"{size:x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    with prompt_client(server) as client:
        client.sendall(start + body)  # all of it before anything is read, as many clients do
        assert error_of(read_all(client))[0] == status
    wait_alone(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_is_answered(server: Serving, stream: bool) -> None:
    body = {**SHORT, "max_tokens": 400, "stream": stream}
    with prompt_client(server) as client:
        client.sendall(asking(body))
        client.shutdown(socket.SHUT_WR)
        answer = read_all(client)
    assert b'"finish_reason":"length"' in answer
    assert not stream or answer.count(b"data: ") >= 401 and b"[DONE]" in answer
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_is_not(server: Serving, stream: bool) -> None:
    ends: list[Output] = []
    engine = server.state.engine
    engine.observers.append(lambda outputs: ends.extend(o for o in outputs if o.finish_reason))
    with prompt_client(server) as client:
        client.sendall(asking({**LONG, "max_tokens": 4000, "stream": stream}))
        while not engine.engine.parts.scheduler.num_running:
            time.sleep(0.001)
    wait_alone(server)
    server.wait_idle()
    assert [end.finish_reason for end in ends] == [FinishReason.ABORT]


@pytest.mark.slow
def test_answers_that_nobody_takes_are_dropped(server: Serving) -> None:
    with prompt_client(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        wait_alone(server, 100)


@pytest.mark.slow
def test_a_stream_that_nobody_takes_is_dropped(server: Serving) -> None:
    with prompt_client(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = {**LONG, "max_tokens": 1500, "logprobs": 20, "n": 8, "stream": True}
        client.sendall(asking(body))
        wait_alone(server, 100)
    server.wait_idle()


def test_what_is_no_request_is_named(server: Serving) -> None:
    with prompt_client(server) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        status, error = error_of(read_all(client))
        assert status == 400 and error["type"] == "invalid_request_error"


def test_what_follows_a_request_does_not_spoil_its_answer(server: Serving) -> None:
    with prompt_client(server) as client:
        client.sendall(asking({**SHORT, "max_tokens": 300}) + b"no request\r\n\r\n")
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer
        assert answer.count(b"HTTP/1.1") == 1


def test_pipelined_requests_are_answered_in_order(server: Serving) -> None:
    with prompt_client(server) as client:
        one, two = (asking({**SHORT, "max_tokens": count}) for count in (7, 5))
        client.sendall(one + two + asking({**SHORT, "max_tokens": 3}, "connection: close"))
        answer = read_all(client)
        assert [b'"completion_tokens":%d' % count in answer for count in (7, 5, 3)] == [True] * 3
        assert answer.count(b"HTTP/1.1 200") == 3


SMALL = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "40000000")
BODY = {"prompt": "x = ", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 1500, "n": 64}
TEXT = "/v1/completions"
UNFINISHED = (
    f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\n"
    "content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
).encode()
"""A request whose body never comes."""
LATE = """
import os, signal, sys

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

sys.late = Late()
"""
"""A `sitecustomize` that has a signal come after Python has given up its own handlers."""


@contextmanager
def process_of(*options: str, **given: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, url = start_server(*SMALL, *options, **given)
    try:
        yield process, url
    finally:
        process.kill()
        process.communicate()


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_0() -> None:
    with process_of() as (process, url):
        body = {**BODY, "stream": True}
        with httpx.stream("POST", url + TEXT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            found = events(lines)
        assert found[-1] == "[DONE]"
        assert '"finish_reason":"length"' in found[-2]
        assert process.wait(30) == 0


@pytest.mark.slow
def test_everyone_is_told_when_the_drain_ends() -> None:
    """One stream, one plain request, one body that never comes; others ask meanwhile."""
    plain: list[httpx.Response] = []

    def ask(url: str) -> None:
        plain.append(httpx.post(url + TEXT, json=ENDLESS, timeout=60))

    with process_of("--drain-s", "2") as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        asking = threading.Thread(target=ask, args=(url,))
        streamed = {**ENDLESS, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", url + TEXT, json=streamed, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            asking.start()
            time.sleep(0.5)  # it is accepted
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert b"503" in slow.recv(10_000)
            health = httpx.get(url + "/health")
            assert health.status_code == 503 and "draining" in health.text
            refused = httpx.post(url + TEXT, json=BODY)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert refused.json()["error"]["code"] == "draining"
            assert httpx.get(url + "/health/live").status_code == 200
            assert time.monotonic() - began < 2, "too late to say anything"
            found = events(lines)
        asking.join()
        assert process.wait(30) == 0
    assert found[-1] == "[DONE]"
    assert json.loads(found[-2])["error"]["code"] == "draining"
    assert plain[0].status_code == 503
    assert plain[0].json()["error"]["code"] == "draining"


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_waits_for_nobody_and_a_slow_body_holds_nothing(
    first: signal.Signals, tmp_path: Path
) -> None:
    """Nor does a third one matter, while the process is being torn down."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    options = ("--drain-s", "600")
    with process_of(*options, customize=tmp_path) as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        with httpx.stream("POST", url + TEXT, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(first)
            while httpx.get(url + "/health").status_code != 503:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            found = events(lines)
            assert found[-1] == "[DONE]"
            assert json.loads(found[-2])["error"]["code"] == "draining"
        assert process.wait(30) == 0
    with process_of("--drain-s", "600") as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        assert httpx.get(url + "/health").status_code == 200
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.slow
def test_half_open_connections_are_not_let_use_all_descriptors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_of(log=log, descriptors=64) as (_, url), ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(connect(url))
            client.sendall(b"GET /health HTTP/1.1\r\nhos" if number % 2 else b"")
        for _ in range(5):
            assert httpx.get(url + "/health", timeout=30).status_code == 200
        assert httpx.post(url + TEXT, json={**BODY, "max_tokens": 3}).status_code == 200
    assert len(log.read_text().splitlines()) < 50


@pytest.mark.slow
def test_without_descriptors_the_server_waits_and_says_so_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_of(log=log) as (process, url):
        used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 5, hard))
        with ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(connect(url))
            time.sleep(3)
        assert httpx.get(url + "/health", timeout=30).status_code == 200
    lines = log.read_text().splitlines()
    assert len([line for line in lines if re.search("connections wait", line)]) == 1
    assert len(lines) < 50


ASKED: dict[str, Any] = {
    "prompt": "class Stack:\n",
    "max_tokens": 40,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
}


def text_of(url: str) -> str:
    headers = {"x-request-id": "mine"}
    answer = httpx.post(url + "/v1/completions", json=ASKED, headers=headers, timeout=60)
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_a_killed_server_starts_again_as_if_nothing_had_been(tmp_path: Path) -> None:
    """In the middle of a stream, then on the same port, and nothing is left in its folder."""
    port = str(free_port())
    process, url = start_server(*SMALL, "--port", port, folder=tmp_path)
    try:
        expected = text_of(url)
        with pytest.raises(httpx.RemoteProtocolError):
            with httpx.stream(
                "POST",
                url + "/v1/completions",
                json={**ASKED, "max_tokens": 1500, "stream": True},
                timeout=60,
            ) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                process.kill()
                assert process.wait(10) == -9
                list(lines)
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.iterdir())
    log = tmp_path / "log"
    options = ("--port", port, "--metrics-prefix", "ours", "--log-format", "json")
    drafts = ("--spec-model", "demo-draft", "--spec-tokens", "3", "--no-adaptive-speculation")
    process, again = start_server(*SMALL, *options, *drafts, log=log)
    try:
        assert again == url
        assert text_of(url) == expected
        names = set(re.findall(r"^([a-z_]+:\w+)", httpx.get(url + "/metrics").text, re.M))
        assert {name.split(":")[0] for name in names} == {"vllm", "ours"}
        assert {"ours:drafting_seconds_total", "ours:request_acceptance_length_bucket",
                "ours:http_responses_total", "ours:device_memory_bytes"} <= names  # fmt: skip
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    own = [line["message"] for line in logged if line.get("request_id") == "mine"]
    assert own == ["accepted", "http"]
    [accepted] = [line for line in logged if line["message"] == "accepted"]
    [ended] = [line for line in logged if line["message"] == "ended"]
    assert 0 < ended["queued_ms"] <= ended["ttft_ms"] <= ended["e2e_ms"]
    assert ended["id"] == accepted["id"] and ended["completion_tokens"] == 40


LOSES = """
from foretoken.engine.engine import Engine


def broken(engine, arrive=None):
    outputs = step(engine, arrive)
    if any(output.request_id != "warm-up" for output in outputs):
        raise SystemError("cosmic ray")
    return outputs


step, Engine.step = Engine.step, broken
"""
"""A `sitecustomize` whose engine fails after the first step of a client's request, committed."""


@pytest.mark.slow
def test_a_lost_engine_ends_the_process_with_1(tmp_path: Path) -> None:
    """After every open request was answered, and without a word of the cause to clients."""
    (tmp_path / "sitecustomize.py").write_text(LOSES)
    log = tmp_path / "log"
    process, url = start_server(*SMALL, log=log, customize=tmp_path)
    try:
        with httpx.stream(
            "POST", url + "/v1/completions", json={**ASKED, "stream": True}, timeout=60
        ) as answer:
            text = answer.read().decode()
        assert '"internal_server_error"' in text and text.endswith("data: [DONE]\n\n"), text
        assert "cosmic" not in text
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.communicate()
    assert "cosmic ray" in log.read_text() and "engine is lost" in log.read_text()
