"""How much the bodies may hold together that have not come whole.

When there is no room for more, the body goes whose sender has been silent longest, with 503 and
`retry-after`: whoever sends is served, whoever stalls makes room. Invariant: the bytes held are at
most the room's; small bodies are not counted, so that they always get in.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import final

from foretoken.server.problems import Problem
from foretoken.server.transport.json_size import SMALL

LARGEST_BODIES = 16
"""Bodies of the largest size that there is room for."""


@final
class BodyRoom:
    """What all connections of a server share."""

    def __init__(self, max_body_bytes: int) -> None:
        """Nobody has sent anything; no body is larger than `max_body_bytes`."""
        self.most_bytes = LARGEST_BODIES * max_body_bytes
        self.held_bytes = 0
        self._large: dict[IncomingBody, None] = {}
        """Bodies that are counted; who has just sent something stands last."""

    @contextmanager
    def body(self) -> Iterator["IncomingBody"]:
        """A body that begins to come; it holds nothing behind the block."""
        body = IncomingBody(self)
        try:
            yield body
        finally:
            self.leave(body)

    def take(self, body: "IncomingBody", more_bytes: int) -> None:
        """`body` grows; others may have to go for it."""
        self._large.pop(body, None)
        while self._large and self.held_bytes + more_bytes > self.most_bytes:
            silent = next(iter(self._large))
            self.leave(silent)
            silent.drop()
        self.held_bytes += more_bytes
        self._large[body] = None

    def leave(self, body: "IncomingBody") -> None:
        """`body` holds nothing more."""
        if body in self._large:
            del self._large[body]
            self.held_bytes -= len(body.raw)


@final
class IncomingBody:
    """One body while it comes; `BodyRoom.body` gives it."""

    def __init__(self, room: BodyRoom) -> None:
        """Nothing has come."""
        self.raw = bytearray()
        self._room = room
        self._waiting: asyncio.Timeout | None = None
        self._dropped = False

    def add(self, chunk: bytes) -> None:
        """More has come."""
        size, more = len(self.raw), len(chunk)
        if size + more > SMALL:
            self._room.take(self, more if size > SMALL else size + more)
        self.raw += chunk

    @asynccontextmanager
    async def unless_dropped(self) -> AsyncIterator[None]:
        """The reading of it.

        Raises:
            Problem: 503, it had to make room.
        """
        try:
            async with asyncio.timeout(None) as self._waiting:
                yield
        except TimeoutError:
            if not self._dropped:
                raise
            message = "there is no room for a body that comes so slowly just now; send it again"
            headers = {"retry-after": "1", "connection": "close"}
            raise Problem(503, message, headers=headers) from None

    def drop(self) -> None:
        """Make room for others."""
        self.raw = bytearray()
        self._dropped = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())
