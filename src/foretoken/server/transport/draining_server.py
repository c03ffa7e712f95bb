"""uvicorn's server with an end that keeps its word, and an accepting that does not run wild.

From a signal on, requests are answered with 503 and those accepted before may go on; when they
have ended, or `drain_s` is over and they have been told so, the server closes.

Of one connection it owns what a client may send and hold before anything is known of it, and how it
ends: the size of a head and the time of a whole request, half-closed clients, and an end that does
not reset what the client is still sending. Knows no endpoint.
Invariants: a request that has not come whole within `client_timeout_s` is answered with 408 or
closed; when there are too many connections, the one that has kept the server waiting longest goes,
never one whose answer is being made; data that nobody takes is dropped within two time-outs.
"""

import asyncio
import errno
import functools
import logging
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from types import FrameType
from typing import Any, Protocol, cast, final

import uvicorn
from starlette.types import ASGIApp

from foretoken.listening.http1 import Http1Protocol
from foretoken.server.problems import Problem, draining
from foretoken.server.settings import Limits
from foretoken.server.transport.connection_limit import ACCEPTED_AT_ONCE, most_connections
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.events import to_json

MOST_HEAD_BYTES = 1 << 16
MOST_HEADERS = 128
_FED_AT_ONCE = 1 << 14
_LINGER_S = 10.0
"""How long what a client still sends is read and thrown away after an early answer."""
_PROBES_S = (0.01, 1.0)
"""First and longest time between signs of life to a client that has sent its last byte."""


@final
class _Writer:
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


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What all connections share."""

    client_timeout_s: float
    """Most seconds for a request to come whole, and for a client to take any data."""
    most_connections: int


@final
class Connection(Http1Protocol):
    """Reads requests and writes answers, within limits."""

    def __init__(self, limits: ConnectionLimits, **given: Any) -> None:
        """`given` is what uvicorn gives its protocols."""
        super().__init__(**given)
        self.ending = False
        """Whether nothing more is written."""
        self._limits = limits
        self._socket: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._taker: Taker
        self._whole = True
        """Whether every request that was begun has been read to its end."""
        self._in_head = False
        self._head_bytes = 0
        """Of a head that has not come whole, without the piece that it began in."""
        self._named_bytes = 0
        """Of the URL and the headers that have been read."""
        self._eof = False
        self._deaf = False
        """Whether what comes is thrown away."""
        self._dropped = False
        self._problem: Problem | None = None
        self._waiting_since = self.loop.time()

    # What comes in.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Make room for it, and wait for its first request."""
        self._socket = transport
        self._taker = Taker(transport, self._limits.client_timeout_s, self.drop)
        super().connection_made(
            cast(asyncio.Transport, _Writer(transport, self.hang_up, lambda: self.ending))
        )
        self._wait()
        if len(self.connections) > self._limits.most_connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        """Read as far as the limits allow; after an answer that ends the connection, not at all."""
        for start in range(0, len(data), _FED_AT_ONCE):
            if self._deaf or self.ending or self._socket.is_closing():
                return
            piece, in_head = data[start : start + _FED_AT_ONCE], self._in_head
            super().data_received(piece)
            self._head_bytes += len(piece) if in_head and self._in_head else 0
            if self._in_head and self._head_bytes > MOST_HEAD_BYTES:
                self.refuse(_head_too_large())
        if self._timer is None and not self.ending and (self._idle or not self._whole):
            self._wait()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Nothing more comes; an answer that is being made may still be wanted."""
        self._eof = True
        if not self.busy:
            return False
        self.cycle.keep_alive = False
        self._probe(_PROBES_S[0])
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self.ending = True
        self._stop_waiting()
        self._taker.unwatch()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    # Callbacks of the parser; what they raise makes it stop.

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._whole, self._in_head = False, True
        self._head_bytes = self._named_bytes = 0
        self._waiting_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        """More of its URL."""
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        """Its body begins."""
        super().on_headers_complete()
        self._in_head = self._offers_upgrade

    def on_message_complete(self) -> None:
        """A request has been read."""
        super().on_message_complete()
        if not self._offers_upgrade:
            self._whole = True
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """An answer has been written; what is left of its request must come soon."""
        super().on_response_complete()
        self._waiting_since = self.loop.time()

    # How it ends.

    @property
    def busy(self) -> bool:
        """Whether a request that was read whole is being answered."""
        if self.pipeline:
            return True
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def refuse(self, problem: Problem) -> None:
        """Read no further: answer with a problem and hang up, after the answer under way if any."""
        self._deaf = True
        if self.busy:
            self.cycle.keep_alive = False
            return
        cycle = self.cycle
        answered = cycle is not None and cycle.response_started and not self._in_head
        if answered and not self._whole:
            self.hang_up()  # an answer that did not wait for the end of its request
        else:
            self._say(problem)

    def refuse_unread(self, problem: Problem) -> None:
        """Refuse a request whose body has not come whole."""
        if not (self.busy or self._whole or self._in_head or self.ending):
            self.refuse(problem)

    def end(self, problem: Problem) -> None:
        """Give a request that has no answer yet this one; drop the connection otherwise."""
        if self.busy and not self.pipeline and not self.cycle.response_started:
            self._say(problem)
        else:
            self.drop()

    def _say(self, problem: Problem) -> None:
        self.transport.write(answer_of(problem))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.hang_up()

    def refuse_head(self, why: str) -> None:
        """Called where the parser stopped."""
        self.refuse(self._problem or Problem(400, why))

    def hang_up(self) -> None:
        """Close, once what was written is out, and without resetting a client that still sends."""
        if self.ending or self._socket.is_closing():
            return
        self.ending = True
        self._stop_waiting()
        self._unset_keepalive_if_required()
        if self._eof or (self._whole and not self._deaf):
            self._close()
            return
        self._deaf = True
        with suppress(OSError):
            self._socket.write_eof()
        self.flow.resume_reading()
        self._timer = self.loop.call_later(_LINGER_S, self._close)

    def drop(self) -> None:
        """Close at once."""
        self._dropped = True
        self._socket.abort()

    def shutdown(self) -> None:
        """The server ends: close what is not being answered, with nothing to wait for."""
        if self.busy:
            self.cycle.keep_alive = False
        else:
            self._socket.close()

    def _close(self) -> None:
        self._socket.close()
        self._taker.watch()

    # Waiting for the client.

    @property
    def _idle(self) -> bool:
        return self._whole and not self.busy and self.timeout_keep_alive_task is None

    def _wait(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(self._limits.client_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        self._timer = None
        if self.busy:
            self._wait()
        elif self._whole:
            self.hang_up()
        else:
            limit = self._limits.client_timeout_s
            self.refuse(Problem(408, f"the request did not come whole within {limit:g} s"))

    def pause_writing(self) -> None:
        """Much waits to be taken."""
        super().pause_writing()
        self._taker.watch()

    def resume_writing(self) -> None:
        """Most of it was taken."""
        super().resume_writing()
        if not self._socket.is_closing():
            self._taker.unwatch()

    def _make_room(self) -> None:
        found = [c for c in self.connections if isinstance(c, Connection)]
        waiting = [c for c in found if not c.busy and not c._dropped]
        longest = min(waiting, key=lambda c: c._waiting_since)
        if longest is self:
            headers = {"retry-after": "1"}
            self.refuse(Problem(503, "there are too many connections", headers=headers))
        else:
            longest.drop()

    def _probe(self, wait_s: float) -> None:
        """Whether a client that sent its last byte is still there shows when something is sent.

        An interim answer before the answer, and an empty comment within a stream of events, are
        nothing to a client that is there; one that has gone resets the connection.
        """
        cycle = self.cycle
        if self.ending or cycle.response_complete:
            return
        if cycle.scope["http_version"] == "1.1" and not self.pipeline:
            if not cycle.response_started:
                self._socket.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            elif cycle.chunked_encoding:
                self._socket.write(b"3\r\n:\n\n\r\n")
        self.loop.call_later(wait_s, self._probe, min(2 * wait_s, _PROBES_S[1]))

    def _count_head(self, more_bytes: int) -> None:
        self._named_bytes += more_bytes
        if self._named_bytes > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
            self._problem = _head_too_large()
            raise self._problem


def _head_too_large() -> Problem:
    allowed = f"{MOST_HEAD_BYTES} bytes in at most {MOST_HEADERS} headers"
    return Problem(431, f"the head of the request is too large; allowed: {allowed}")


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
