"""HTTP/1.0 and 1.1 as their standard (RFC 9112) has them: uvicorn's protocol, where it does not.

Knows no endpoint. Invariants: an `Upgrade` that a client offers is not taken, and its request is
read as if it had not; a body whose transfer coding is not known is never read; a request has one
Host; an HTTP/1.0 client gets no chunks.
"""

from abc import ABC, abstractmethod
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_VERSIONS = ("1.0", "1.1")


class HeadError(Exception):
    """A head that cannot be taken; the message names the header, what was given, what may be."""


class Http1Protocol(HttpToolsProtocol, ABC):
    """Reads requests and writes answers."""

    @abstractmethod
    def refuse_head(self, why: str) -> None:
        """Answer what is no request, or none that is taken, with 400, and end the connection."""

    def data_received(self, data: bytes) -> None:
        """Read; what is no request is answered with 400."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offered:
                data = self._head_without_upgrade() + data[offered.args[0] :]
                self.parser = httptools.HttpRequestParser(self)  # the other one may be at its end
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except httptools.HttpParserError as error:
                why = error.__context__
                known = str(why) if isinstance(why, HeadError) else f"not HTTP/1.1: {error}"
                self.refuse_head(known)
                return

    def on_headers_complete(self) -> None:
        """A head has been read; one that offers an upgrade is read again without."""
        self._check_head()
        if self._offers_upgrade:
            return
        super().on_headers_complete()
        self.headers = []  # the app has those of the head; what a trailer says is none of them
        if self.scope["http_version"] == "1.0":
            _end_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        """A request has been read; not so where its head is read again."""
        if not self._offers_upgrade:
            super().on_message_complete()

    @property
    def _offers_upgrade(self) -> bool:
        """Whether the parser takes all behind this head for another protocol's."""
        return bool(self.parser.should_upgrade())

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last, as the parser takes it for one with a body."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def _check_head(self) -> None:
        """Raise a HeadError for what the parser takes and the standard, or we, do not."""
        version, method = self.parser.get_http_version(), self.parser.get_method()
        if version not in _VERSIONS:
            raise HeadError(f"version: got HTTP/{version}; allowed: HTTP/1.0, HTTP/1.1")
        if method == b"CONNECT":
            raise HeadError("method: got CONNECT; allowed: methods that are not a proxy's")
        codings = self._values(b"transfer-encoding")
        if codings and codings.lower() != b"chunked":
            raise HeadError(f"transfer-encoding: got {_shown(codings)}; allowed: chunked")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1:
            raise HeadError(f"host: got {hosts} of them; allowed: one")
        _, absolute, rest = self.url.partition(b"://")
        if not self.url.startswith(b"/") and absolute:
            named, given = rest.partition(b"/")[0].partition(b"?")[0], self._values(b"host")
            if named.lower() != given.lower():
                allowed = f"the host of the request's URL, {_shown(named)}"
                raise HeadError(f"host: got {_shown(given)}; allowed: {allowed}")

    def _values(self, name: bytes) -> bytes:
        """The values of a header, which one with commas would say too."""
        return b", ".join(value.strip() for one, value in self.headers if one == name)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """An answer as HTTP/1.0 has it: one of unknown length ends where the connection does."""
    send, sized = cycle.send, True
    cycle.waiting_for_100_continue = False

    async def unchunked(message: Any) -> None:
        nonlocal sized
        if message["type"] == "http.response.start":
            sized = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if sized else False
        elif message["type"] == "http.response.body" and not sized:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = unchunked  # type: ignore[method-assign]


def _shown(value: bytes) -> str:
    return repr(value[:200].decode("latin-1"))
