"""Where two answers part, and whether rounding can be why.

Compares tokens where both servers tell them, else texts. Two tokens whose log-probabilities are
close may change places with the batch that they are computed in.
"""

from collections.abc import Sequence
from typing import NamedTuple

from foretoken.lab.audit.check import FINE, Look
from foretoken.lab.audit.replies import Reply


class Parting(NamedTuple):
    """The first place where two answers differ."""

    token: int | None
    """Its number; None where tokens are not told."""
    gap: float | None
    """How much less likely the second answer's token is, by the first one's log-probabilities."""
    why: str


def common(a: Sequence[str], b: Sequence[str]) -> int:
    """How many entries are the same at the beginning."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def part(first: Reply, second: Reply) -> Parting | None:
    """Where `second` leaves `first`; None if the texts are equal."""
    if first.text == second.text:
        return None
    if first.tokens is None or not first.tells_all:
        at = common(first.text, second.text)
        return Parting(None, None, f"differs after {at} characters")
    if second.tokens is None or not second.tells_all:
        return _part_text(first, second.text)
    at = common(first.tokens, second.tokens)
    where = f"differs at token {at + 1}"
    if at >= len(first.tokens) or at >= len(second.tokens):
        return Parting(at, None, f"{where}, where one ends")
    mine, other = first.tokens[at], second.tokens[at]
    tops = first.tops[at] if at < len(first.tops) else {}
    where = f"{where}: {other!r} instead of {mine!r}"
    if mine not in tops:
        return Parting(at, None, where)
    if other not in tops:
        least = min(tops.values())
        return Parting(at, tops[mine] - least, f"{where}, not among the likeliest {len(tops)}")
    gap = tops[mine] - tops[other]
    return Parting(at, gap, f"{where}, {gap:.3f} less likely")


def _part_text(first: Reply, other: str) -> Parting:
    """Where a text whose tokens are not told leaves `first`, by the likeliest of its tokens."""
    assert first.tokens is not None, "just seen"
    at, begin, parts = 0, 0, common(first.text, other)
    while begin + len(first.tokens[at]) <= parts and at + 1 < len(first.tokens):
        begin += len(first.tokens[at])
        at += 1
    mine, tops = first.tokens[at], first.tops[at] if at < len(first.tops) else {}
    where = f"differs at token {at + 1}, after {parts} characters"
    fitting = [token for token in tops if token != mine and other.startswith(token, begin)]
    found = max((token for token in fitting if token), key=len, default=None)
    if mine not in tops or found is None:
        return Parting(at, None, where)
    gap = tops[mine] - tops[found]
    return Parting(at, gap, f"{where}: {found!r} instead of {mine!r}, {gap:.3f} less likely")


def same_or_near(first: Reply, second: Reply, plain: Reply | None, tie: float) -> Look:
    """As `same`; where `first` does not tell how likely its tokens were, both may instead be what
    plain decoding writes, but for near-ties."""
    found = same(first, second, tie)
    if found.sort == "fine" or plain is None or not plain.ok:
        return found
    parting = part(first, second)
    if parting is None or parting.gap is not None:
        return found
    both = (same(plain, one, tie) for one in (first, second))
    return Look(sort="fine", why="near-tie") if all(o.sort == "fine" for o in both) else found


def same(first: Reply, second: Reply, tie: float) -> Look:
    """Fine if the answers are equal or part at a near-tie."""
    found = part(first, second)
    if found is None or (found.gap is not None and found.gap <= tie):
        return FINE if found is None else Look(sort="fine", why="near-tie")
    return Look(sort="differs", why=found.why)
