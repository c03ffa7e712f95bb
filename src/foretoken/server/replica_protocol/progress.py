"""Marks in a stream for the front: which tokens of which choice all bytes so far have carried.

A mark is a comment of the event stream, and the front takes it out. Between two marks lies what one
step gave, so a stream that breaks off can be cut behind its last mark: what came later is known to
be incomplete, and is made again elsewhere.
"""

import json
from collections.abc import Iterable
from typing import NamedTuple

_BEGINNING = b": progress "
_END = b"\n\n"


class StreamProgress(NamedTuple):
    """What a choice gained."""

    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None


def mark(gained: Iterable[StreamProgress]) -> bytes:
    """The mark behind the events that carry what was gained."""
    return _BEGINNING + json.dumps(list(gained), separators=(",", ":")).encode() + _END


def read_mark(event: bytes) -> list[StreamProgress] | None:
    """What a mark says; None for any other event. `event` is without its empty line. Raises
    ValueError: it begins like a mark and is none."""
    if not event.startswith(_BEGINNING):
        return None
    gained = json.loads(event.removeprefix(_BEGINNING))
    try:
        return [StreamProgress(choice, tuple(ids), reason) for choice, ids, reason in gained]
    except TypeError as error:
        raise ValueError("a mark of another form") from error
