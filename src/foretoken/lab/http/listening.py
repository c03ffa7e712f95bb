"""A small server for one application, which reads all that is HTTP/1 and ends without a rest."""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from foretoken.errors import ConfigError
from foretoken.listening.http1 import Http1Protocol


class _Connection(Http1Protocol):
    def refuse_head(self, why: str) -> None:
        self.send_400_response(why)


class _Serving(uvicorn.Server):
    """uvicorn's server with an end that leaves no connection open."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End as uvicorn does, then cut clients whose requests had to be cancelled."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # in which the transports give their sockets back


def serving(app: ASGIApp) -> uvicorn.Server:
    """A server of `app`, not yet running."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http=_Connection,
        ws="none",
        lifespan="on",
        access_log=False,
        server_header=False,
        date_header=False,
        log_level="critical",
        timeout_graceful_shutdown=1,
    )
    return _Serving(config)


def bind(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A listening socket; port 0 takes any free one. Raises ConfigError if the port is taken, or
    there is no such address here."""
    # asyncio turns Nagle's algorithm off only where a socket says that it is TCP; with it on, the
    # chunks of a stream wait for each other.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        allowed = f"a port that is free here, or 0 for any ({error})"
        raise ConfigError("--port", f"{host}:{port}", allowed) from error
    listener.listen(2048)
    return listener
