"""How often another candidate is right where the first ones of a place are not.

Owns one chance for each rank of a drafter's candidates, learnt from trees: a candidate was tried if
all before it were refused. Knows neither requests nor depths.
"""

from collections.abc import Iterable, Sequence
from typing import final

MOST_CANDIDATES = 32
"""Candidates of a place that are told apart."""
_USUAL = 0.25
"""The chance of a candidate nobody has tried yet."""
_WEIGHT = 8.0
"""Trials that this counts for."""
_FADE = 0.998


@final
class OtherCandidates:
    """Faded trials of second, third ... candidates."""

    __slots__ = ("_accepted", "_trials")

    def __init__(self) -> None:
        """No trial yet."""
        self._accepted = [0.0] * MOST_CANDIDATES
        self._trials = [0.0] * MOST_CANDIDATES

    def observe(self, tried: Iterable[tuple[int, int]]) -> None:
        """Places of one branch: how many candidates each had, and which was accepted (-1: none)."""
        accepted, trials = self._accepted, self._trials
        for candidates, kept in tried:
            last = kept + 1 if kept >= 0 else candidates
            for rank in range(1, min(last, MOST_CANDIDATES)):
                trials[rank] = _FADE * trials[rank] + 1.0
                accepted[rank] = _FADE * accepted[rank] + (rank == kept)

    def chances(self) -> Sequence[float]:
        """By rank, the first of which says nothing: that it is right if all before are refused."""
        return [
            (accepted + _WEIGHT * _USUAL) / (trials + _WEIGHT)
            for accepted, trials in zip(self._accepted, self._trials, strict=True)
        ]
