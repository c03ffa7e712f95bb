"""What a connection may do before anything is known of it, seen from raw sockets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import Limits, ServerConfig
from foretoken.server.transport.connection import MOST_HEAD_BYTES, MOST_HEADERS
from foretoken.types import FinishReason, Output
from tests.e2e.serving import Serving, serving

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


def connect(server: Serving) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
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
    with connect(server) as client:
        client.sendall(start + b"a" * size)
        status, error = error_of(read_all(client))
        assert status == 431 and str(MOST_HEAD_BYTES) in error["message"]


def test_many_headers_are_too_many(server: Serving) -> None:
    with connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * (MOST_HEADERS + 1) + b"\r\n")
        assert error_of(read_all(client))[0] == 431
    with connect(server) as client:
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
    with connect(server) as client:
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
        clients = [stack.enter_context(connect(server)) for _ in starts]
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
            client = stack.enter_context(connect(server))
            client.sendall([b"GET /health HT", head(100) + b"{", b""][number % 3])
            if number % ROOM == 0:
                assert httpx.get(server.url + "/health", timeout=30).status_code == 200
        assert len(server.runner.server_state.connections) <= ROOM + 2
    wait_alone(server)


def test_who_is_being_answered_keeps_the_room(server: Serving) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(connect(server)) for _ in range(ROOM)]
        for client in busy:
            client.sendall(asking({**LONG, "stream": True}))
            assert client.recv(100)
        late = stack.enter_context(connect(server))
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
    with connect(server) as client:
        client.sendall(start + body)  # all of it before anything is read, as many clients do
        assert error_of(read_all(client))[0] == status
    wait_alone(server)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_sends_no_more_is_answered(server: Serving, stream: bool) -> None:
    body = {**SHORT, "max_tokens": 400, "stream": stream}
    with connect(server) as client:
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
    with connect(server) as client:
        client.sendall(asking({**LONG, "max_tokens": 4000, "stream": stream}))
        while not engine.engine.parts.scheduler.num_running:
            time.sleep(0.001)
    wait_alone(server)
    server.wait_idle()
    assert [end.finish_reason for end in ends] == [FinishReason.ABORT]


@pytest.mark.slow
def test_answers_that_nobody_takes_are_dropped(server: Serving) -> None:
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 1000)
        wait_alone(server, 100)


@pytest.mark.slow
def test_a_stream_that_nobody_takes_is_dropped(server: Serving) -> None:
    with connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = {**LONG, "max_tokens": 1500, "logprobs": 20, "n": 8, "stream": True}
        client.sendall(asking(body))
        wait_alone(server, 100)
    server.wait_idle()


def test_what_is_no_request_is_named(server: Serving) -> None:
    with connect(server) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03")
        status, error = error_of(read_all(client))
        assert status == 400 and error["type"] == "invalid_request_error"


def test_what_follows_a_request_does_not_spoil_its_answer(server: Serving) -> None:
    with connect(server) as client:
        client.sendall(asking({**SHORT, "max_tokens": 300}) + b"no request\r\n\r\n")
        answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 200") and b'"finish_reason":"length"' in answer
        assert answer.count(b"HTTP/1.1") == 1


def test_pipelined_requests_are_answered_in_order(server: Serving) -> None:
    with connect(server) as client:
        one, two = (asking({**SHORT, "max_tokens": count}) for count in (7, 5))
        client.sendall(one + two + asking({**SHORT, "max_tokens": 3}, "connection: close"))
        answer = read_all(client)
        assert [b'"completion_tokens":%d' % count in answer for count in (7, 5, 3)] == [True] * 3
        assert answer.count(b"HTTP/1.1 200") == 3
