"""Requests as odd clients write them, to every kind of listener of ours. The guarded bugs: the body
behind an `Upgrade` is dropped, HTTP/1.0 clients get chunks, compressed bodies are read as plain,
which of two Host headers is meant."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from foretoken.server.settings import Limits
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer
from tests.mock_server.server import mock_running

BODY = b'{"prompt": "x"}'
CHUNKED = b"5\r\n" + BODY[:5] + b"\r\na\r\n" + BODY[5:] + b"\r\n0\r\n\r\n"
PLAIN = "content-length: 15"
JAVA = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB"
OFFERS = {
    "java": JAVA,
    "websocket": "connection: keep-alive, upgrade\r\nUpgrade: websocket\r\n"
    "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13",
    "tls": "Upgrade: TLS/1.0\r\nConnection: Upgrade",
    "several": "upgrade: h2c\r\nupgrade: websocket, x/1\r\nconnection: upgrade\r\nconnection: x",
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says what came: whole, or below /stream piece by piece."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    request = Request(scope, receive)
    body = (await request.body()).decode()
    said = {"method": scope["method"], "path": scope["path"], "body": body}
    if scope["path"] == "/stream":

        async def pieces() -> Any:
            for letter in body:
                yield letter

        await StreamingResponse(pieces())(scope, receive, send)
    else:
        trailed = request.headers.get("x-trailed", "")
        await JSONResponse({**said, "trailed": trailed})(scope, receive, send)


class Nothing:
    """What a server without requests has accepted."""

    num_open = 0

    def end_all(self) -> None:
        """End none."""


@contextmanager
def draining() -> Iterator[str]:
    drain = Drain(0.0)
    runner = DrainingServer(echo, Limits(client_timeout_s=30), Nothing(), drain)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        listening.listen()
        thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
        thread.start()
        yield f"http://127.0.0.1:{port}"
        drain.begin()
        thread.join(30)
    assert not thread.is_alive()


@pytest.fixture(scope="module", params=["server", "lab"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    with draining() if request.param == "server" else mock_running(echo) as found:
        yield found


def asked(*lines: str, path: str = "/", version: str = "1.1", host: str = "host: x\r\n") -> bytes:
    head = [f"POST {path} HTTP/{version}\r\n{host}content-type: application/json", *lines]
    return "\r\n".join([*head, "", ""]).encode()


LAST = asked(PLAIN, "connection: close", path="/last") + BODY


def exchange(url: str, *pieces: bytes) -> bytes:
    """All that is answered until the server ends the connection; each piece is sent alone."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            client.sendall(piece)
        return b"".join(iter(lambda: client.recv(65536), b""))


def answers(raw: bytes) -> list[Any]:
    found = []
    while raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 "), head
        [length] = [int(line[16:]) for line in head.lower().split(b"\r\n") if b"-length" in line]
        found.append(json.loads(raw[:length]))
        raw = raw[length:]
    return found


@pytest.mark.parametrize("cut", [None, 1, 7])
@pytest.mark.parametrize("body", ["plain", "chunked"])
@pytest.mark.parametrize("offer", OFFERS)
def test_an_upgrade_is_not_taken_and_the_body_is_read(
    url: str, offer: str, body: str, cut: int | None
) -> None:
    """In one piece or cut anywhere, twice on a connection, with another request right behind."""
    framing, content = (PLAIN, BODY) if body == "plain" else ("transfer-encoding: chunked", CHUNKED)
    whole = 2 * (asked(OFFERS[offer], framing) + content) + LAST
    pieces = [whole] if cut is None else [whole[i : i + cut] for i in range(0, len(whole), cut)]
    first, second, last = answers(exchange(url, *pieces))
    assert first["body"] == second["body"] == last["body"] == BODY.decode()
    assert (first["path"], first["method"], last["path"]) == ("/", "POST", "/last")


def test_who_offers_an_upgrade_may_wait_to_be_told_to_go_on(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(asked(JAVA, PLAIN, "expect: 100-continue", "connection: close"))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        [answer] = answers(b"".join(iter(lambda: client.recv(65536), b"")))
    assert answer["body"] == BODY.decode()


def test_an_upgrade_of_a_request_without_a_body(url: str) -> None:
    get = f"GET /a?b=%2f HTTP/1.1\r\nhost: x\r\n{JAVA}\r\n\r\n".encode()
    assert len(answers(exchange(url, get.replace(b"Upgrade, ", b"Upgrade, close, ") + LAST))) == 1
    one, two, last = answers(exchange(url, get + get + LAST))
    assert one == two and one["path"] == "/a" and not one["body"] and last["path"] == "/last"


def test_many_offers_in_one_piece_are_answered_each(url: str) -> None:
    get = b"GET / HTTP/1.1\r\nhost:x\r\nconnection:upgrade\r\nupgrade:h2c\r\n\r\n"
    assert len(answers(exchange(url, 40 * get + LAST))) == 41


@pytest.mark.parametrize("more", ["", "connection: keep-alive\r\n", JAVA + "\r\n"])
def test_http_1_0_gets_no_chunks(url: str, more: str) -> None:
    raw = exchange(url, asked(PLAIN, path="/stream", version="1.0", host=more) + BODY)
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == BODY
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    whole = exchange(url, asked(PLAIN, "expect: 100-continue", version="1.0", host=more) + BODY)
    [answer] = answers(whole)
    assert answer["body"] == BODY.decode()


def test_http_1_1_still_gets_them(url: str) -> None:
    raw = exchange(url, asked(PLAIN, "connection: close", path="/stream") + BODY)
    assert b"transfer-encoding: chunked" in raw and raw.endswith(b"\r\n0\r\n\r\n")


WRONG = {
    "two hosts": (asked(PLAIN, "host: localhost"), "host: got 2"),
    "the same host twice": (asked(PLAIN, "Host: x"), "host: got 2"),
    "another host in the URL": (asked(PLAIN, path="http://y/"), "host: got 'x'; allowed: .*'y'"),
    "a host in the URL alone": (asked(PLAIN, path="http://y/", host=""), "host: got ''"),
    "a user in the URL": (asked(PLAIN, path="http://x@y/"), "host: got 'x'"),
    "gzip": (asked("transfer-encoding: gzip, chunked"), "transfer-encoding: got 'gzip, chunked'"),
    "gzip apart": (asked("transfer-encoding: gzip\r\ntransfer-encoding: chunked"), "'gzip, chunk"),
    "identity": (asked("transfer-encoding: identity"), "allowed: chunked"),
    "chunked twice": (asked("transfer-encoding: chunked, chunked"), "Transfer-Encoding"),
    "nothing": (asked("transfer-encoding: "), ""),
    "length and chunks": (asked(PLAIN, "transfer-encoding: chunked"), ""),
    "two lengths": (asked(PLAIN, "content-length: 14"), ""),
    "0.9": (asked(PLAIN, version="0.9"), "version: got HTTP/0.9"),
    "2.0": (asked(PLAIN, version="2.0"), "version: got HTTP/2.0"),
    "h2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", ""),
    "connect": (b"CONNECT x:80 HTTP/1.1\r\nhost: x:80\r\n\r\n", ""),
    "connect with an offer": (b"CONNECT x:80 HTTP/1.1\r\n" + JAVA.encode() + b"\r\n\r\n", ""),
    "gzip with an offer": (asked(JAVA, "transfer-encoding: gzip, chunked"), "transfer-encoding"),
    "two hosts with an offer": (asked(JAVA, PLAIN, "host: y"), "host: got 2"),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_cannot_be_read_as_it_was_meant_is_refused(url: str, wrong: str) -> None:
    head, why = WRONG[wrong]
    raw = exchange(url, asked(JAVA, PLAIN) + BODY, head + CHUNKED + LAST)
    # Pipelined behind another request it may end the connection without an answer of its own.
    assert raw.count(b"HTTP/1.1 200 ") <= 1
    raw = exchange(url, head + CHUNKED + LAST)
    assert raw.startswith(b"HTTP/1.1 400 ") and raw.count(b"HTTP/1.1 400") == 1, raw
    assert re.search(why, raw.decode()), raw


def test_the_url_may_name_the_host_too(url: str) -> None:
    one, _ = answers(exchange(url, asked(PLAIN, path="http://X/a?b") + BODY + LAST))
    assert one["path"] == "/a"


def test_trailers_are_no_headers(url: str) -> None:
    trailed = CHUNKED.removesuffix(b"\r\n") + b"x-trailed: yes\r\nhost: evil.example\r\n\r\n"
    one, _ = answers(exchange(url, asked("transfer-encoding: chunked") + trailed + LAST))
    assert one["body"] == BODY.decode() and one["trailed"] == ""
