"""Acceptance by counts: every rate, length and share by position that is reported is worked out
here, of whatever verifications were counted.

A histogram counts verifications by how many drafts they had, or accepted: entry j those with j.
What is expected of drafts before they are checked is for the models of `foretoken.control`.
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeVar

Number = TypeVar("Number", int, float)


def acceptance_rate(accepted: float, drafted: float) -> float:
    """Accepted per drafted token; 0 without drafts."""
    return accepted / drafted if drafted else 0.0


def acceptance_length(accepted: float, verifications: float) -> float:
    """Tokens per verification with a draft, the recovered or bonus token included; 1 of none."""
    return 1.0 + accepted / verifications if verifications else 1.0


def histogram_of(counts: Iterable[int]) -> tuple[int, ...]:
    """How often 0, 1, 2, ... stand in `counts`, up to the largest."""
    found: list[int] = []
    for count in counts:
        found.extend([0] * (count + 1 - len(found)))
        found[count] += 1
    return tuple(found)


def reached(histogram: Sequence[Number]) -> list[Number]:
    """How many verifications came to 1, 2, ... drafts or more."""
    return list(accumulate(reversed(histogram[1:])))[::-1]


def accepted_by_position(
    accepted_K: Sequence[float], drafted_K: Sequence[float], *, of_all: bool = False
) -> tuple[float, ...]:
    """Share of the verifications that drafted so far and accepted each position, all before it
    included, by histograms; with `of_all` of those, too, that drafted less."""
    of: list[float] = reached(drafted_K)
    kept: list[float] = reached(accepted_K)
    kept += [0.0] * (len(of) - len(kept))
    if of_all:
        of = [sum(accepted_K)] * len(of)
    return tuple(acceptance_rate(one, tried) for one, tried in zip(kept, of, strict=True))
