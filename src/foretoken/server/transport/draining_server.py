"""uvicorn's server with an end that keeps its word, and an accepting that does not run wild.

From a signal on, requests are answered with 503 and those accepted before may go on; when they
have ended, or `drain_s` is over and they have been told so, the server closes.
"""

import asyncio
import errno
import functools
import logging
import socket
import time
from types import FrameType
from typing import Any, Protocol, final

import uvicorn
from starlette.types import ASGIApp

from foretoken.server.problems import draining
from foretoken.server.settings import Limits
from foretoken.server.transport.connection import Connection, ConnectionLimits
from foretoken.server.transport.connection_limit import ACCEPTED_AT_ONCE, most_connections
from foretoken.server.transport.drain import Drain

logger = logging.getLogger("foretoken")

_WAITING_IN_KERNEL = 2048
"""Connections that wait to be accepted."""
_TOLD_EVERY_S = 60.0
_LAST_WORDS_S = 2.0
"""For answers to reach clients after everything has been ended."""
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Work(Protocol):
    """What a server has accepted."""

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""

    def end_all(self) -> None:
        """End them; whoever reads one is told."""


@final
class DrainingServer(uvicorn.Server):
    """Serves one app until it is drained."""

    def __init__(
        self, app: ASGIApp, limits: Limits, work: Work, drain: Drain, descriptors: int = 1
    ) -> None:
        """Serve `app`, which has accepted `work`, until `drain` has begun and is over; a connection
        takes so many descriptors."""
        allowed = ConnectionLimits(
            client_timeout_s=limits.client_timeout_s,
            most_connections=most_connections(limits.max_connections, descriptors),
        )
        protocol: Any = functools.partial(Connection, allowed)
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                log_config=None,
                log_level="error",
                access_log=False,
                server_header=False,
                ws="none",
                lifespan="on",
                backlog=ACCEPTED_AT_ONCE,
                timeout_graceful_shutdown=1,
            )
        )
        self._work = work
        self._drain = drain
        self._told_at = -_TOLD_EVERY_S
        self._open_at = 0.0
        """When there was last something to do."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening. uvicorn's backlog is also how many are accepted in one go."""
        asyncio.get_running_loop().set_exception_handler(self._on_trouble)
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(_WAITING_IN_KERNEL)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: drain; another one: do not wait."""
        self._drain.begin()

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; whether to close."""
        if self._drain() and self._drained():
            self.should_exit = True
        return await super().on_tick(counter)

    def _drained(self) -> bool:
        """Whether nothing is being answered any more; ends what should have ended."""
        ours = [c for c in self.server_state.connections if isinstance(c, Connection)]
        for connection in ours:
            connection.refuse_unread(draining())
        if self._work.num_open:
            self._open_at = time.monotonic()
        if self._drain.is_over:
            self._work.end_all()
            if time.monotonic() - self._open_at >= _LAST_WORDS_S:
                for connection in ours:
                    connection.end(draining())
        return not self.server_state.tasks

    def _on_trouble(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Errors that nobody awaited. Of those about descriptors there may be many."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_ROOM:
            loop.default_exception_handler(context)
        elif time.monotonic() - self._told_at >= _TOLD_EVERY_S:
            self._told_at = time.monotonic()
            logger.error("connections wait to be accepted: %s (see `ulimit -n`)", error)
