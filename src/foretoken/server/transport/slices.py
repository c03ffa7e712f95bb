"""Large JSON, made and written in slices between which everything else on the loop runs.

An answer may have hundreds of thousands of log-probabilities; made in one piece it would hold up
every stream of the server. Knows nothing of what is written. Invariant: between two rounds of the
loop one slice is written, however many large answers there are at once.
"""

import asyncio
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import final

from starlette.types import Receive, Scope, Send

from foretoken.server.transport.events import LateList, to_json

SLICE_BYTES = 1 << 14
"""JSON that is written without letting anything else run; about a millisecond."""
_PIECE_BYTES = 1 << 11
"""What is written before the first slice, without waiting for a turn: most answers are smaller."""
_MOST_AT_ONCE = 512
"""Entries of a list that are encoded together, however small they are."""
_SENT_AT_ONCE = 1 << 16


def pieces(value: object) -> Iterator[bytes]:
    """`value` as `to_json` writes it, in pieces; `LateList` in objects are made piece by piece."""
    if isinstance(value, LateList):
        yield from _list(value)
    elif isinstance(value, dict) and _holds_rows(value):
        start = b"{"
        for name, one in value.items():
            yield start + to_json(name) + b":"
            yield from pieces(one)
            start = b","
        yield b"}"
    else:
        yield to_json(value)


def _holds_rows(value: object) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_rows, value.values()))
    return isinstance(value, LateList)


def _list(rows: LateList) -> Iterator[bytes]:
    entries, start, count = iter(rows), b"[", 1
    while some := list(islice(entries, count)):
        if count == 1 and _holds_rows(some[0]):
            yield start
            yield from pieces(some[0])
        else:
            piece = to_json(some)[1:-1]
            yield start + piece
            # How large an entry is shows when it is written: ids are many in a piece, rows few.
            count = min(2 * count, _MOST_AT_ONCE) if len(piece) < _PIECE_BYTES else count
        start = b","
    yield b"[]" if start == b"[" else b"]"


async def in_slices(made: Iterable[bytes], turn: asyncio.Lock) -> list[bytes]:
    """All pieces, made slice by slice.

    Args:
        made: pieces of JSON.
        turn: shared by all that write on this loop; whoever has it writes the next slice.
    """
    left, written = iter(made), list[bytes]()
    if _take(left, written, _PIECE_BYTES):
        return written
    while True:
        async with turn:
            await asyncio.sleep(0)
            if _take(left, written, SLICE_BYTES):
                return written


def _take(left: Iterator[bytes], written: list[bytes], most: int) -> bool:
    """Make pieces of `most` bytes in all; whether none is left."""
    for piece in left:
        written.append(piece)
        most -= len(piece)
        if most <= 0:
            return False
    return True


def gathered(written: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces that are worth a call each."""
    waiting, size = list[bytes](), 0
    for piece in written:
        waiting.append(piece)
        size += len(piece)
        if size >= _SENT_AT_ONCE:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


@final
class JsonAnswer:
    """An ASGI response of JSON that was written in pieces; no faster than the client takes it."""

    def __init__(self, written: list[bytes]) -> None:
        self._written = written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        length = sum(map(len, self._written))
        headers = [
            (b"content-length", str(length).encode()),
            (b"content-type", b"application/json"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in gathered(self._written):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
