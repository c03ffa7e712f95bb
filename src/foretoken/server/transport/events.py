"""Server-sent events and how long to go on: streams of chunks, disconnects, slow readers.

Owns the transport of answers that take time. Knows nothing of what they say. Invariant: the
source of events is closed when the client has gone, when it stops reading, and at the end.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Any, TypeVar, final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from foretoken.server.problems import Problem, internal

Result = TypeVar("Result")
Events = AsyncGenerator[bytes, None]
"""Events; those that are given out together are sent together. Large ones come in parts."""

DONE = b"data: [DONE]\n\n"


@final
class LateList:
    """A JSON list whose entries are made when they are written, once; it may be a long one."""

    def __init__(self, entries: Iterable[Any]) -> None:
        """`entries` are what JSON takes, or objects that hold `LateList` themselves."""
        self._entries = entries

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries)


def to_json(value: object) -> bytes:
    """Compact UTF-8; asserts (by raising) that there is no NaN in it."""
    text = json.dumps(
        value, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=_listed
    )
    return text.encode("utf-8", "replace")


def json_response(value: object) -> Response:
    """An answer with `value` as its body."""
    return Response(to_json(value), media_type="application/json")


def _listed(value: object) -> list[Any]:
    if not isinstance(value, LateList):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return list(value)


def as_event(chunk: dict[str, Any]) -> bytes:
    """A chunk as an event."""
    return b"data: " + to_json(chunk) + b"\n\n"


class EventStream:
    """An ASGI response that sends events, and at the end [DONE]."""

    def __init__(
        self, events: Events, close: Callable[[], None], request_id: str, timeout_s: float
    ) -> None:
        """Send `events`.

        `close` is called when there is nothing more to send, whatever the reason. A client that
        takes no data for `timeout_s` counts as gone.
        """
        self._events = events
        self._close = close
        self._request_id = request_id
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end or until the client has gone."""
        writing = asyncio.ensure_future(self._write(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Cancelled before its source is closed, which would look like the end of the answer.
            tasks = [task for task in (writing, gone) if not task.done()]
            for task in tasks:
                task.cancel()
            self._close()
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
        if not writing.cancelled():
            writing.result()

    async def _write(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._events) as source:
            try:
                async for events in source:
                    if events:
                        await self._send(send, events, more=True)
            except Problem as problem:
                await self._send(send, self._error(problem), more=True)
            except TimeoutError:
                return
            except Exception:
                await self._send(send, self._error(internal()), more=False)
                raise
        await self._send(send, DONE, more=False)

    def _error(self, problem: Problem) -> bytes:
        return as_event(problem.body(self._request_id))

    async def _send(self, send: Send, data: bytes, *, more: bool) -> None:
        async with asyncio.timeout(self._timeout_s):
            await send({"type": "http.response.body", "body": data, "more_body": more})


async def unless_gone(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which is cancelled when the client hangs up. Raises Problem: 499, the
    client has gone."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Problem(499, "the client has gone")
    finally:
        for one in (gone, task):
            if not one.done():
                one.cancel()
                with suppress(asyncio.CancelledError):
                    await one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
