"""How many drafts of a request were accepted, beside how many were to be expected.

Whether drafts are accepted is chance, even where their chances are known to the last digit: of
four requests that gain by the plan one is soon behind plain steps. A new plan would not help it,
since it would be the same plan. Knows chances and counts, no times.
"""

import math
from collections.abc import Sequence as Seq
from typing import NamedTuple, final

import numpy as np

from foretoken.control.adaptive.allocation import Allocation, DraftOption

_DEVIATIONS = 2.0
"""Standard deviations below the expectation up to which it is chance."""


class Expected(NamedTuple):
    """Drafts of one sequence that a step is expected to see accepted."""

    mean: float
    variance: float


Chances = tuple[Expected, ...]
"""For 1, 2, ... drafts that were checked; nothing: none are drawn."""


@final
class AcceptanceDeviation:
    """Of one request, in all steps of a plan."""

    __slots__ = ("accepted", "mean", "variance")

    def __init__(self) -> None:
        """No step yet."""
        self.accepted, self.mean, self.variance = 0, 0.0, 0.0

    def add(self, drafted: int, accepted: int, chances: Chances) -> None:
        """One more step, in which so many drafts were checked and so many accepted."""
        self.accepted += accepted
        if drafted and chances:
            expected = chances[min(drafted, len(chances)) - 1]
            self.mean += expected.mean
            self.variance += expected.variance

    @property
    def is_chance(self) -> bool:
        """Whether it may be chance alone: who had so few was not to be expected to have more by
        far."""
        return self.accepted >= self.mean - _DEVIATIONS * math.sqrt(self.variance)


def chances(found: Allocation, options: Seq[DraftOption]) -> list[Chances]:
    """Of each sequence of a plan."""
    most_by = [_by_count(option, found.depth) for option in options]

    def of(place: int, index: int, length: int) -> Chances:
        if index < 0:
            return ()
        means, variances = most_by[index]
        return tuple(map(Expected, means[place][:length], variances[place][:length]))

    each = zip(found.drafter_N.tolist(), found.lengths_N.tolist(), strict=True)
    return [of(place, index, length) for place, (index, length) in enumerate(each)]


def _by_count(option: DraftOption, depth: int) -> tuple[list[list[float]], list[list[float]]]:
    """Means and variances of chains of 1, 2, ... drafts of each sequence."""
    survival_NK = option.survival_NK[:, :depth]
    mean_NK = np.cumsum(survival_NK, axis=1)
    # The square of a count is the sum of 1, 3, 5, ... over the counts up to it.
    odd_K = 2.0 * np.arange(survival_NK.shape[1]) + 1.0
    variance_NK = np.cumsum(odd_K * survival_NK, axis=1) - mean_NK**2
    return mean_NK.tolist(), variance_NK.tolist()
