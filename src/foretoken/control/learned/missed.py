"""What the model of time misses: a factor for each load, with drafts and without."""

import math
from typing import final

_LEARNS, _AT_ONCE = 0.1, 0.3
"""Share of a step in what the model of time misses, and the most that one step says of it."""


@final
class MissedTime:
    """What the model of time misses at a load, with drafts and without: it has few terms, and no
    step is quite like another."""

    def __init__(self) -> None:
        """It misses nothing."""
        self._logs: dict[tuple[int, bool], float] = {}

    def of(self, sequences: int) -> tuple[float, float]:
        """Logarithms of measured over modelled seconds, without drafts and with them."""
        power = sequences.bit_length()
        off = self._logs.get((power, False), 0.0)
        if (power, True) in self._logs:
            return off, self._logs[power, True]
        # At a load where nobody drafted yet drafts add what they add at the nearest other one.
        known = [other for other, drafted in self._logs if drafted]
        if not known:
            return off, off
        nearest = min(known, key=lambda other: abs(other - power))
        return off, off + self._logs[nearest, True] - self._logs.get((nearest, False), 0.0)

    def observe(self, sequences: int, ratio: float, steps: int, *, drafted: bool) -> None:
        """Steps of so many sequences took `ratio` times as long as modelled."""
        key = (sequences.bit_length(), drafted)
        before = self._logs.get(key, 0.0)
        missed = min(max(math.log(ratio), before - _AT_ONCE), before + _AT_ONCE)
        learns = 1.0 - (1.0 - _LEARNS) ** steps
        self._logs[key] = before + learns * (missed - before)
