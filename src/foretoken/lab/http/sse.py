"""Server-sent events of a finished answer, each with the time its last byte arrived.

Knows only the frame format (lines `data:`, a blank line between events), not what is inside.
"""

import json
from collections.abc import Sequence
from typing import Any


def split_events(pieces: Sequence[tuple[float, bytes]]) -> tuple[list[tuple[float, bytes]], bytes]:
    """Events as (arrival, data), and what was left over after the last blank line."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, piece in pieces:
        rest = rest + piece if rest else piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        if b"\n\n" not in rest:
            continue
        *frames, rest = rest.split(b"\n\n")
        for frame in frames:
            data = _data_of(frame)
            if data is not None:
                events.append((at, data))
    return events, rest


def _data_of(frame: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in frame.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


def parse_events(
    pieces: Sequence[tuple[float, bytes]], *, torn: bool = False
) -> tuple[list[tuple[float, dict[str, Any]]], bool]:
    """JSON objects with their arrivals, and whether the stream ended with [DONE].

    Of a `torn` stream the last event may be cut in the middle, and is left out then.

    Raises:
        ValueError: an event is not a JSON object.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    events, rest = split_events(pieces)
    if not torn and rest.strip().startswith(b"data:"):
        events.append((pieces[-1][0], _data_of(rest.strip()) or b""))
    for at, data in events:
        if data.strip() == b"[DONE]":
            return found, True
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"an event is not an object: {data[:60]!r}")
        found.append((at, value))
    return found, False
