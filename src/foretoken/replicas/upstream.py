"""One attempt of a request at one replica, over HTTP.

Owns the connection and what is read from it: the whole of an answer, or the events of a stream up
to each mark (`server.replica_protocol.progress`). Whatever breaks it off is a `ReplicaFailed`.
Knows neither other replicas nor what becomes of the request.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar, final

import httpx

from foretoken.server.replica_protocol.progress import StreamProgress, read_mark
from foretoken.server.transport.events import DONE

MOST_UNMARKED = 64 << 20
"""Bytes between two marks; a replica that sends more does not speak our language."""
_END = b"\n\n"
Result = TypeVar("Result")


class ReplicaFailed(Exception):
    """The replica died, hung, or broke off; caught by whoever sends the request elsewhere."""


class Marked(NamedTuple):
    """Events up to a mark."""

    events: bytes
    """As a client takes them; empty where there is nothing for it."""
    gained: list[StreamProgress]


class Unmarked(NamedTuple):
    """What stood behind the last mark of a stream that came to its end: an error, or nothing."""

    events: bytes


@final
class Upstream:
    """An open request; `close` it whatever happens."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        """Nothing is sent yet; `url` is the endpoint's."""
        self._client = client
        self._url = url
        self._response: httpx.Response | None = None
        self._waiting: asyncio.Timeout | None = None
        self._lost = False
        self.forget: Callable[[], None] = lambda: None
        """Called when it is closed."""

    async def open(self, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send the request; the head of the answer.

        Raises:
            ReplicaFailed: there is none.
        """
        request = self._client.build_request("POST", self._url, content=body, headers=headers)
        self._response = await self._wait_for(self._client.send(request, stream=True))
        return self._response

    async def whole(self) -> bytes:
        """All of the answer.

        Raises:
            ReplicaFailed: it broke off.
        """
        assert self._response is not None, "nothing was sent"
        return await self._wait_for(self._response.aread())

    async def parts(self) -> AsyncGenerator[Marked | Unmarked, None]:
        """The events of a stream; an `Unmarked` is the last.

        Raises:
            ReplicaFailed: it broke off, or cannot be read.
        """
        assert self._response is not None, "nothing was sent"
        pieces = self._response.aiter_raw()
        waiting, whole = b"", bytearray()
        while True:
            piece = await self._wait_for(anext(pieces, None))
            if piece is None:
                raise ReplicaFailed("its stream ended in the middle")
            *events, waiting = (waiting + piece).split(_END)
            for event in events:
                try:
                    gained = read_mark(event)
                except ValueError as error:
                    raise ReplicaFailed(f"it sent a mark that is none ({error})") from error
                if gained is not None:
                    yield Marked(bytes(whole), gained)
                    whole.clear()
                elif event + _END == DONE:
                    yield Unmarked(bytes(whole))
                    return
                elif event != b":":  # an empty comment: it wanted to know whether we are there
                    whole += event + _END
            if len(whole) + len(waiting) > MOST_UNMARKED:
                raise ReplicaFailed(f"it sent {len(whole):,} bytes without a mark")

    def lose(self) -> None:
        """The replica is known to be gone: end the waiting for it."""
        self._lost = True
        if self._waiting is not None:
            self._waiting.reschedule(asyncio.get_running_loop().time())

    async def close(self) -> None:
        """Hang up; a replica that is still writing ends the request."""
        self.forget()
        if self._response is not None:
            with suppress(httpx.HTTPError, OSError):
                await self._response.aclose()

    async def _wait_for(self, work: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(0.0 if self._lost else None) as self._waiting:
                return await work
        except TimeoutError:
            raise ReplicaFailed("it does not answer any more") from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise ReplicaFailed(str(error) or type(error).__name__) from error
        finally:
            self._waiting = None
