"""How many tokens a request will still write, from those that requests of its class wrote.

Owns the lengths of outputs that are over. One that was cut off by its limit or its user is longer
than what it shows, and is counted as such (Kaplan and Meier 1958). Knows no text.
"""

from bisect import bisect_right
from collections import deque
from typing import final

import numpy as np

_KEPT = 256
"""Lengths of a class that are remembered, the newest."""
_FEWEST = 32.0
"""Tokens that an output of an unknown class is taken to have left, if it has not more already."""
_WEIGHT = 2.0
"""Ended outputs that this guess counts for."""
_REFRESH = 8
"""A curve is drawn again after one new length to so many old ones."""
_MOST_CLASSES = 256
"""Classes that are remembered, the ones used last."""


@final
class _ClassLengths:
    """Lengths of one class, and the curve of how many outputs are longer than a length."""

    def __init__(self) -> None:
        self.lengths: deque[tuple[int, bool]] = deque(maxlen=_KEPT)
        """Tokens of outputs that are over; whether they ended by themselves."""
        self.new = 1
        self.steps: list[int] = []
        """Lengths at which the curve falls, and the longest of all."""
        self.above: list[float] = [1.0]
        """Share of outputs longer than all steps before this one."""
        self.area: list[float] = [0.0]
        """Tokens beyond each step, times shares: the area below the curve."""
        self.reached: list[int] = [0]
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
        self.steps = steps.tolist()
        self.above = above.tolist()
        self.area = [*(np.cumsum(pieces[::-1])[::-1] + tail).tolist(), tail]
        self.reached = [*at_risk.tolist(), 0]
        self.new = 0

    def remaining(self, num_output: int) -> tuple[float, int]:
        """Mean tokens left of an output that has `num_output`, and how many that rests on."""
        if self.new * _REFRESH > len(self.lengths):
            self.draw()
        place = bisect_right(self.steps, num_output)
        reached = self.reached[place]
        if not reached:
            return 0.0, 0
        above = self.above[place]
        return self.area[place] / above + self.steps[place] - num_output, reached


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

    def remaining(self, class_key: str, num_output: int, most: int) -> float:
        """Tokens that a request with `num_output` is expected to write still, at most `most`.

        The guess for an unknown class is as many as it has, and 32 at the least.
        """
        guess = max(_FEWEST, float(num_output))
        one = self._classes.get(class_key)
        if one is not None:
            mean, reached = one.remaining(num_output)
            guess = (reached * mean + _WEIGHT * guess) / (reached + _WEIGHT)
        return min(guess, float(most))

    def _class(self, class_key: str) -> _ClassLengths:
        found = self._classes.pop(class_key, None) or _ClassLengths()
        if len(self._classes) >= _MOST_CLASSES:
            del self._classes[next(iter(self._classes))]
        self._classes[class_key] = found
        return found
