"""The sending side of a connection: its end, clients that take nothing, answers without an app."""

import asyncio
import uuid
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, final

from foretoken.server.problems import Problem
from foretoken.server.transport.events import to_json


@final
class Line:
    """A transport whose `close` is the affair of its connection."""

    def __init__(
        self, transport: asyncio.Transport, hang_up: Callable[[], None], ending: Callable[[], bool]
    ) -> None:
        """Closing is `hang_up`; nothing is written any more once it is `ending`."""
        self._transport = transport
        self._ending = ending
        self.close = hang_up

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is written."""
        return self._ending() or self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Write, unless it is closing."""
        if not self.is_closing():
            self._transport.write(data)


@final
class Taker:
    """Watches whether a client takes what waits for it, while nothing is added."""

    def __init__(
        self, transport: asyncio.Transport, timeout_s: float, drop: Callable[[], None]
    ) -> None:
        """`drop` is called when nothing was taken for `timeout_s`."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._drop = drop
        self._timer: asyncio.TimerHandle | None = None

    def watch(self) -> None:
        """Begin, or go on."""
        if self._timer is None:
            self._check(None)

    def unwatch(self) -> None:
        """It takes enough."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, before: int | None) -> None:
        self._timer = None
        waiting = self._transport.get_write_buffer_size()
        if waiting and before is not None and waiting >= before:
            self._drop()
        elif waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._timeout_s, self._check, waiting)


def answer_of(problem: Problem) -> bytes:
    """A whole answer in OpenAI's shape that ends the connection."""
    request_id = uuid.uuid4().hex
    body = to_json(problem.body(request_id))
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        **problem.headers,
    }
    lines = [f"HTTP/1.1 {problem.status} {HTTPStatus(problem.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
