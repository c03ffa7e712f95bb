"""How many values a JSON body holds, found without reading it as JSON.

Reading millions of tiny values takes seconds in which no other Python runs, the engine's thread
included; one long text takes none. So what is bounded is the number of values, not of bytes.
"""

from typing import NamedTuple

import numpy as np

from foretoken.server.problems import Problem

SMALL = 1 << 16
"""Bytes of a body that are read in a few milliseconds, whatever they are."""


class JsonSize(NamedTuple):
    """What stands in a body outside of its strings."""

    values: int
    """Commas: one less than the values of each list and object."""
    members: int
    """Colons: names of objects."""
    nests: int
    """Lists and objects."""


MOST = JsonSize(values=1 << 18, members=1 << 14, nests=1 << 13)
"""Read in some tens of milliseconds; a token array has one value a token."""


def json_size(raw: bytes) -> JsonSize:
    """Count; a body that is not JSON gives some counts too."""
    # Escapes first, two backslashes before a quotation mark: each mark left opens or ends a string.
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    signs = np.frombuffer(plain, dtype=np.uint8)
    inside = np.bitwise_xor.accumulate((signs == ord('"')).view(np.uint8)).view(np.bool_)

    def outside(sign: str) -> int:
        return int(np.count_nonzero((signs == ord(sign)) > inside))

    return JsonSize(values=outside(","), members=outside(":"), nests=outside("[") + outside("{"))


def check_json_size(raw: bytes) -> None:
    """Raise a Problem (400) for a body with more values than are read at once."""
    at_most = JsonSize(raw.count(b","), raw.count(b":"), raw.count(b"[") + raw.count(b"{"))
    if all(given <= most for given, most in zip(at_most, MOST, strict=True)):
        return
    names = ("values", "members of objects", "lists and objects")
    for name, given, most in zip(names, json_size(raw), MOST, strict=True):
        if given > most:
            raise Problem(400, f"the body has {given:,} {name}; allowed: {most:,}")
