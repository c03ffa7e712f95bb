"""How many tokens a request will still write, from those that requests of its class wrote.

Owns the lengths of outputs that are over. One that was cut off by its limit or its user is longer
than what it shows, and is counted as such (Kaplan and Meier 1958). Knows no text.
"""

from collections import deque
from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

_KEPT = 256
"""Lengths of a class that are remembered, the newest."""
_FEWEST = 32.0
"""Tokens that an output of an unknown class is taken to have left, if it has not more already."""
_REFRESH = 8
"""A curve is drawn again after one new length to so many old ones."""
MOST_CLASSES = 256
"""Classes of requests that are remembered, the ones used last: of lengths, and of each drafter."""


@final
class _ClassLengths:
    """Lengths of one class, and the curve of how many outputs are longer than a length."""

    def __init__(self) -> None:
        self.lengths: deque[tuple[int, bool]] = deque(maxlen=_KEPT)
        """Tokens of outputs that are over; whether they ended by themselves."""
        self.new = 1
        self.steps: NDArray[np.int64] = np.zeros(0, np.int64)
        """Lengths at which the curve falls, and the longest of all."""
        self.above: NDArray[np.float64] = np.ones(1)
        """Share of outputs longer than all steps before this one."""
        self.area: NDArray[np.float64] = np.zeros(1)
        """Tokens beyond each step, times shares: the area below the curve."""
        self.reached: NDArray[np.int64] = np.zeros(1, np.int64)
        """Outputs that are as long as this step, or longer."""

    def draw(self) -> None:
        """Work out the curve."""
        over = np.array(self.lengths, np.int64).reshape(-1, 2)
        ends = over[over[:, 1] == 1, 0]
        seen = np.sort(over[:, 0])
        # Up to the longest that was cut the curve is known as well.
        steps, counts = np.unique(np.append(ends, seen[-1:]), return_counts=True)
        counts[-1] -= 1
        at_risk = len(seen) - np.searchsorted(seen, steps, "left")
        above = np.concatenate([[1.0], np.cumprod(1.0 - counts / at_risk)])
        # Beyond it nothing is: those that got there go on for as long as they lasted.
        last = float(steps[-1])
        tail = above[-1] * max(last, _FEWEST)
        pieces = np.diff(steps, append=last) * above[1:]
        self.steps, self.above = steps, above
        self.area = np.append(np.cumsum(pieces[::-1])[::-1] + tail, tail)
        self.reached = np.append(at_risk, 0)
        self.new = 0

    def remaining(
        self, outputs_N: NDArray[np.int64]
    ) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Mean tokens left of outputs of so many, and how many that rests on, [N] each."""
        if self.new * _REFRESH > len(self.lengths):
            self.draw()
        places_N = np.searchsorted(self.steps, outputs_N, side="right")
        reached_N = self.reached[places_N]
        known_N = reached_N > 0
        # Where nobody got that far, any step and share will do.
        steps_N = self.steps[np.minimum(places_N, len(self.steps) - 1)] if known_N.any() else 0
        above_N = np.where(known_N, self.above[places_N], 1.0)
        mean_N = self.area[places_N] / above_N + steps_N - outputs_N
        return np.where(known_N, mean_N, 0.0), reached_N


@final
class OutputLengths:
    """Expected remaining tokens of a request: the mean residual life of outputs of its class."""

    def __init__(self) -> None:
        """Nothing known yet."""
        self._classes: dict[str, _ClassLengths] = {}

    def ended(self, class_key: str, num_output: int, *, cut: bool = False) -> None:
        """An output of the class is over; `cut`: its limit, its user or an error ended it, not the
        text."""
        one = self._class(class_key)
        one.lengths.append((num_output, not cut))
        one.new += 1

    def remaining(
        self, class_keys: Sequence[str], outputs_N: NDArray[np.int64], most_N: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Tokens that requests with so many are expected to write still, at most `most_N`, [N].

        The guess for an unknown class is as many as it has, and 32 at the least.
        """
        guess_N = np.maximum(float(_FEWEST), outputs_N)
        for key in dict.fromkeys(class_keys):
            one = self._classes.get(key)
            if one is None:
                continue
            at = np.array([other == key for other in class_keys])
            mean_N, reached_N = one.remaining(outputs_N[at])
            # The guess counts for two outputs that ended.
            guess_N[at] = (reached_N * mean_N + 2.0 * guess_N[at]) / (reached_N + 2.0)
        return np.minimum(guess_N, most_N)

    def _class(self, class_key: str) -> _ClassLengths:
        found = self._classes.pop(class_key, None) or _ClassLengths()
        if len(self._classes) >= MOST_CLASSES:
            del self._classes[next(iter(self._classes))]
        self._classes[class_key] = found
        return found
