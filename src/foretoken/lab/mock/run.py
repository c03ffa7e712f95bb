"""Runs the mock server: in this process until stopped, or in a thread while a block lasts."""

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn

from foretoken.lab.mock.server import Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]


def _server(mock: App) -> uvicorn.Server:
    config = uvicorn.Config(
        mock,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        date_header=False,
        log_level="critical",
        timeout_graceful_shutdown=1,
    )
    return uvicorn.Server(config)


def bind(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A listening socket; port 0 takes any free one."""
    # asyncio turns Nagle's algorithm off only where a socket says that it is TCP; with it on, the
    # chunks of a stream wait for each other.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen(2048)
    return listener


def serve(mock: App, listener: socket.socket) -> None:
    """Serve until interrupted."""
    _server(mock).run(sockets=[listener])


@contextmanager
def mock_running(mock: App) -> Iterator[str]:
    """Serve in a thread; gives the URL."""
    listener = bind(0)
    server = _server(mock)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listener.close()
