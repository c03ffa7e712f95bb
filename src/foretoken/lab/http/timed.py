"""HTTP/1.1 requests whose bytes are stamped when they arrive.

A load generator must not be late because it parses: `buffer_updated` takes the time before anything
else, and bodies are kept as (time, bytes) for whoever made the request. Parsing is httptools'. One
connection carries one request at a time; idle ones are kept, and replaced where the server closed
them unasked. Knows nothing of OpenAI's formats.
"""

import asyncio
import math
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Origin:
    """Where to connect, and what stands before every path."""

    host: str
    port: int
    secure: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Origin":
        """From a URL; a trailing /v1 is dropped, since paths bring it. Raises ConfigError if it is
        not an http or https URL with a host."""
        example = "a URL such as http://127.0.0.1:8000"
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
        except ValueError as error:
            raise ConfigError("url", url, f"{example} ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("url", url, example)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError as error:
            raise ConfigError("url", url, f"{example}, with a port from 1 to 65535") from error
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port, parts.scheme == "https", prefix)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.secure else 'http'}://{host}:{self.port}{self.prefix}"


now = time.perf_counter
MOST_BYTES = 1 << 26
"""Of an answer that nobody passes on."""


class TransportError(Exception):
    """The exchange broke: `kind` is connection, timeout, truncated or protocol."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {text}")


class Incoming:
    """An answer while it comes: its connection fills it in, for whoever passes it on."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        self.most_bytes = most_bytes
        """Of a body; one that goes on is broken off."""
        self.head = asyncio.Event()
        self.status = 0
        self.complete = False
        self.headers: list[tuple[str, str]] = []
        self.arrived: list[tuple[float, bytes]] = []
        self.queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        """Pieces of the body, and None at its end, whole or not."""

    @property
    def sized(self) -> bool:
        """Whether its head says where it ends; else it does with the connection (RFC 9112, 6.3)."""
        return any(name in ("content-length", "transfer-encoding") for name, _ in self.headers)

    async def pieces(self) -> AsyncIterator[bytes]:
        while (piece := await self.queue.get()) is not None:
            yield piece

    def cut_off(self, error: TransportError, sent_s: float) -> "Answer":
        """What has come so far, as an answer that broke off."""
        return Answer(self.status, tuple(self.headers), tuple(self.arrived), sent_s, now(), error)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: `pieces` are (arrival on the monotonic clock, bytes)."""

    status: int
    headers: tuple[tuple[str, str], ...]
    pieces: tuple[tuple[float, bytes], ...]
    sent_s: float
    end_s: float
    broken: TransportError | None = None
    """Why the answer is not whole, if it is not."""

    @property
    def unread(self) -> bool:
        """Whether the server closed the connection without a word. Some do right after an answer
        that promised to keep it; what was sent there meanwhile may go over a new one."""
        return self.status == 0 and self.broken is not None and self.broken.kind == "connection"

    @property
    def body(self) -> bytes:
        return b"".join(piece for _, piece in self.pieces)


class Pool(Protocol):
    """What sends a request."""

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        """Send it and wait for the whole answer."""


class _Connection(asyncio.BufferedProtocol):
    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self.incoming: Incoming | None = None
        self.transport: asyncio.Transport | None = None
        self.keep = True
        self._done: asyncio.Future[None] | None = None
        self._bodyless = False
        self._parser = httptools.HttpResponseParser(self)
        self._at = 0.0

    def send(self, request: bytes, incoming: Incoming) -> "asyncio.Future[None]":
        assert self.transport is not None
        self.incoming, self._done = incoming, asyncio.get_running_loop().create_future()
        # Asked by HEAD: the lengths in its head are those of a body that does not come.
        self._bodyless = request.startswith(b"HEAD ")
        incoming.headers.clear()
        self.transport.write(request)
        return self._done

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport), transport
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._at = now()
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except httptools.HttpParserError as error:
            self._fail(TransportError("protocol", f"not HTTP/1.1 ({error})"))
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.incoming is not None:
            pair = (name.decode("latin-1").lower(), value.decode("latin-1"))
            self.incoming.headers.append(pair)

    def on_headers_complete(self) -> None:
        self.keep = self._parser.should_keep_alive()
        incoming, status = self.incoming, self._parser.get_status_code()
        if incoming is None:
            return
        if status < 200:  # such as 100: the answer itself is still to come
            incoming.headers.clear()
            return
        incoming.status = status
        incoming.head.set()
        if self._bodyless:
            self.keep = False
            self.on_message_complete()

    def on_body(self, body: bytes) -> None:
        if self.incoming is not None:
            self.incoming.arrived.append((self._at, body))
            self.incoming.queue.put_nowait(body)
            self.incoming.most_bytes -= len(body)
            if self.incoming.most_bytes < 0:
                self._fail(TransportError("protocol", f"an answer of more than {MOST_BYTES} bytes"))
                self.close()

    def on_message_complete(self) -> None:
        if self.incoming is not None and self.incoming.status >= 200:
            self.incoming.complete = True
            if self._done is not None and not self._done.done():
                self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        self.keep = False
        started = self.incoming is not None and self.incoming.status > 0
        if self.incoming is not None and started and not error and not self.incoming.sized:
            self.on_message_complete()
            return
        text = f"the server closed the connection ({error or 'end of file'})"
        self._fail(TransportError("truncated" if started else "connection", text))

    def _fail(self, error: TransportError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    @property
    def usable(self) -> bool:
        return self.keep and self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()


class HttpPool:
    """Requests to one server."""

    def __init__(self, url: str, *, headers: Mapping[str, str] | None = None) -> None:
        self.origin = Origin.parse(url)
        self._headers = dict(headers or {})
        self._idle: list[_Connection] = []
        self._tls = ssl.create_default_context() if self.origin.secure else None
        # One for all connections: each is emptied before the loop reads the next.
        self._buffer = memoryview(bytearray(1 << 16))

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        incoming: Incoming | None = None,
    ) -> Answer:
        """One request; `incoming` is told of everything as it comes, its end included. An answer
        that breaks off comes back with `broken` set. Raises TransportError if there was none at
        all."""
        request = self._head(method, path, len(body), headers) + body
        incoming, answer = incoming or Incoming(MOST_BYTES), None
        try:
            while self._idle and answer is None:
                if (idle := self._idle.pop()).usable:
                    answer = await self._exchange(idle, request, timeout_s, incoming)
            if answer is None or answer.unread:
                fresh = await self._connect(min(timeout_s, 10.0))
                answer = await self._exchange(fresh, request, timeout_s, incoming)
        finally:
            incoming.queue.put_nowait(None)
        if answer.broken is not None and not answer.status:
            raise answer.broken
        return answer

    async def _exchange(
        self, connection: _Connection, request: bytes, timeout_s: float, incoming: Incoming
    ) -> Answer:
        sent_s, broken = now(), None
        done = connection.send(request, incoming)
        try:
            # Not wait_for, which in Python 3.11 loses a cancellation that comes with the result.
            async with asyncio.timeout(timeout_s):
                await done
        except TimeoutError:
            broken = TransportError("timeout", f"no whole answer within {timeout_s:g} s")
        except TransportError as error:
            broken = error
        finally:
            connection.incoming = None
            if incoming.complete and connection.usable:
                self._idle.append(connection)
            else:
                connection.close()
        pieces = tuple(incoming.arrived)
        end_s = pieces[-1][0] if pieces and not broken else now()
        head = incoming.status, tuple(incoming.headers)
        return Answer(*head, pieces, sent_s, end_s, broken)

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)

    def _head(
        self, method: str, path: str, length: int, headers: Mapping[str, str] | None
    ) -> bytes:
        extra = {**self._headers, **(headers or {})}
        lines = [
            f"{method} {self.origin.prefix}{path} HTTP/1.1",
            f"host: {self.origin.host}:{self.origin.port}",
            f"content-length: {length}",
        ]
        if length and "content-type" not in extra:
            lines.append("content-type: application/json")
        lines += [f"{name}: {value}" for name, value in extra.items()]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _connect(self, timeout_s: float) -> _Connection:
        loop = asyncio.get_running_loop()
        at = (self.origin.host, self.origin.port)
        try:
            making = loop.create_connection(lambda: _Connection(self._buffer), *at, ssl=self._tls)
            async with asyncio.timeout(timeout_s):
                _, connection = await making
        except TimeoutError as error:
            raise TransportError("timeout", f"no connection to {self.origin.url}") from error
        except (OSError, UnicodeError) as error:  # the second: no name that a host can have
            raise TransportError("connection", f"{self.origin.url}: {error}") from error
        return connection
