"""How much the requests of a class differ in what they accept.

Where they are alike, what one shows in its first trials is luck, and its class says more; where
they differ, its own trials do. Knows numbers of trials only.
"""

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.learned.trials import FADE

_WEIGHT = 6.0
"""Trials that a class counts for beside a request's own before its requests showed how they
differ."""
_LEAST, _MOST = 3.0, 48.0
_PRIOR_REQUESTS = 6.0
"""Requests that this counts for."""
_KEEPS = 0.99
"""What requests are multiplied by at each later one."""


@final
class Spread:
    """The variance of chances between requests, by moments: what their shares of accepted first
    drafts vary more than trials of one chance would (the empirical Bayes estimate of a beta prior,
    Kleinman 1973)."""

    __slots__ = ("_beyond", "_requests", "_single")

    def __init__(self) -> None:
        """Nothing known: requests differ as usual."""
        self._requests = self._single = self._beyond = 0.0

    @property
    def weight(self) -> float:
        """Trials that the class counts for beside a request's own."""
        if not self._requests:
            return _WEIGHT
        usual = self._single / self._requests
        beyond = self._beyond + _PRIOR_REQUESTS * usual / (_WEIGHT + 1.0)
        single = self._single + _PRIOR_REQUESTS * usual
        if beyond * (_MOST + 1.0) <= single:
            return _MOST
        return max(single / beyond - 1.0, _LEAST)

    def add(self, accepted: float, trials: float, chance: float) -> None:
        """A request ended.

        Args:
            accepted: first drafts of it that were accepted, faded as its trials are.
            trials: of first drafts.
            chance: of a first draft in its class.
        """
        # Faded trials vary as so many unfaded ones do.
        count = trials * (1.0 + FADE) / (2.0 - trials * (1.0 - FADE))
        # One of fewer trials than its class counts for tells nothing.
        if count < _WEIGHT:
            return
        single = chance * (1.0 - chance)
        off = accepted / trials - chance
        # Between requests the variance is v; seen is v + (single - v) / count.
        seen = (off * off - single / count) * count / (count - 1.0)
        self._requests = _KEEPS * self._requests + 1.0
        self._single = _KEEPS * self._single + single
        self._beyond = _KEEPS * self._beyond + seen


def likely_part(chances_N: NDArray[np.float64], known_N: Sequence[float]) -> NDArray[np.float64]:
    """The part of each chance that is left one standard deviation below it, [N], if it rests on so
    many trials: that of a beta distribution."""
    deviation_N = np.sqrt(chances_N * (1.0 - chances_N) / (1.0 + np.array(known_N)))
    part_N: NDArray[np.float64] = np.maximum(chances_N - deviation_N, 0.0) / chances_N
    return part_N
