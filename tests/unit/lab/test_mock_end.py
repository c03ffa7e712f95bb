"""The mock server's end: nothing of a connection is left, whatever its client does."""

import gc
import socket
import sys
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tests.mock_server.server import mock_running


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
