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
    if first.tokens is None or second.tokens is None:
        at = common(first.text, second.text)
        return Parting(None, None, f"differs after {at} characters")
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


def same(first: Reply, second: Reply, tie: float) -> Look:
    """Fine if the answers are equal or part at a near-tie."""
    found = part(first, second)
    if found is None or (found.gap is not None and found.gap <= tie):
        return FINE if found is None else Look(sort="fine", why="near-tie")
    return Look(sort="differs", why=found.why)
