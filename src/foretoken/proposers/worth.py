"""What drafts are worth, as measured so far: seconds of a step, accepted shares of drafts.

Pure bookkeeping over numbers of past steps; knows no tokens. Old measurements fade, so that what
is estimated follows the text and the machine.
"""

from bisect import bisect_right
from dataclasses import dataclass

_FADE = 0.97
"""What a step's weight is multiplied by at each later one."""
_ROW_SHARE = 0.04
"""Before it is known: what one more row costs, in plain steps."""
_DOUBT = 0.003
"""Relative variance of the rows from which on a measured slope counts more than that guess."""
_TRUST = 0.7
"""Before it is known: accepted tokens per promised one."""
_PRIOR = 6.0
"""How many promised tokens that guess weighs."""
_RANGE = 10.0
"""A sequence is at most this much better or worse than usual."""
_BOUNDS = (1.0, 2.0, 4.0, 8.0, 16.0)
_LEAST_SHARE = 0.1
"""Nothing is believed to be more than ten times as fast as plain decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of one step, for those that learn."""

    num_rows: int
    """Tokens of the target's forward, drafts included."""
    num_prefilled: int
    """Prompt tokens among them."""
    num_sampled: int
    """Sequences that got a token."""
    num_output: int
    """Tokens that they got."""
    seconds: float
    """Of the whole step but drafting."""
    drafting_s: float
    drafts: tuple[tuple[str, str, int], ...]
    """Request id, drafter and accepted tokens of each draft that was checked."""


@dataclass(slots=True)
class _Fit:
    """Faded sums of a straight line through (rows, seconds)."""

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_squared: float = 0.0
    product: float = 0.0

    def add(self, rows: float, seconds: float) -> None:
        self.weight = _FADE * self.weight + 1.0
        self.rows = _FADE * self.rows + rows
        self.seconds = _FADE * self.seconds + seconds
        self.rows_squared = _FADE * self.rows_squared + rows * rows
        self.product = _FADE * self.product + rows * seconds


class StepCost:
    """Seconds of a decoding step by the number of its rows, drafting aside."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._fit = _Fit()

    def add(self, rows: int, seconds: float) -> None:
        """A step without prompt tokens took so long."""
        self._fit.add(float(rows), seconds)

    @property
    def known(self) -> bool:
        """Whether any step was measured."""
        return self._fit.weight > 0.0

    def of_row(self) -> float:
        """Seconds that one more row adds: the slope, as far as steps had different rows."""
        fit = self._fit
        if not self.known:
            return _ROW_SHARE
        mean_rows, mean_s = fit.rows / fit.weight, fit.seconds / fit.weight
        guess = _ROW_SHARE * mean_s / (1.0 + _ROW_SHARE * (mean_rows - 1.0))
        variance = max(fit.rows_squared / fit.weight - mean_rows * mean_rows, 0.0)
        covariance = fit.product / fit.weight - mean_rows * mean_s
        doubt = _DOUBT * mean_rows * mean_rows
        slope = (covariance + doubt * guess) / (variance + doubt)
        return min(max(slope, 0.0), mean_s / mean_rows)

    def of_step(self, rows: int) -> float:
        """Seconds of a step of so many rows; while nothing was measured, in steps of one row."""
        fit = self._fit
        if not self.known:
            return 1.0 + _ROW_SHARE * (rows - 1)
        mean_s, mean_rows = fit.seconds / fit.weight, fit.rows / fit.weight
        return max(mean_s + self.of_row() * (rows - mean_rows), 0.1 * mean_s)


class Ratio:
    """Faded accepted tokens per promised one, near what is usual while little is known."""

    __slots__ = ("_accepted", "_promised")

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._accepted = 0.0
        self._promised = 0.0

    def add(self, promised: float, accepted: float) -> None:
        """One draft's outcome."""
        self._promised = _FADE * self._promised + promised
        self._accepted = _FADE * self._accepted + accepted

    def value(self, usual: float) -> float:
        """Accepted per promised token."""
        return (self._accepted + _PRIOR * usual) / (self._promised + _PRIOR)


class Spent:
    """Faded seconds that tokens took, against what plain steps would have taken for them."""

    __slots__ = ("_plain_s", "_seconds")

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._seconds = 0.0
        self._plain_s = 0.0

    def add(self, seconds: float, plain_s: float) -> None:
        """One step."""
        self._seconds = _FADE * self._seconds + seconds
        self._plain_s = _FADE * self._plain_s + plain_s

    @property
    def share(self) -> float:
        """Of a plain token's time, what a token takes; 1 at most."""
        if self._plain_s <= 0.0:
            return 1.0
        return min(max(self._seconds / self._plain_s, _LEAST_SHARE), 1.0)


class Trust:
    """How far one drafter's promises can be believed, by their size, and what a draft takes."""

    __slots__ = ("_by_size", "_seconds", "idle")

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._by_size = [Ratio() for _ in range(len(_BOUNDS) + 1)]
        self._seconds: float | None = None
        self.idle = 0
        """Drafts of others since it was last used where it could have been."""

    def expected(self, promise: float, own: Ratio | None) -> float:
        """Tokens that a promise will come to in a sequence whose own ratio is `own`."""
        usual = self._by_size[_size(promise)].value(_TRUST)
        if own is None:
            return promise * usual
        return promise * usual * min(max(own.value(1.0), 1 / _RANGE), _RANGE)

    def add(self, promise: float, accepted: int, own: Ratio) -> None:
        """One draft's outcome, for the drafter and for the sequence."""
        ratio = self._by_size[_size(promise)]
        own.add(promise * ratio.value(_TRUST), accepted)
        ratio.add(promise, accepted)

    @property
    def seconds(self) -> float:
        """Of drafting for one sequence; 0 until measured, so that it will be."""
        return self._seconds or 0.0

    def add_seconds(self, seconds: float) -> None:
        """Drafting took so long per sequence; one outlier does not count for more than three."""
        before = self._seconds
        if before is None:
            self._seconds = seconds
        else:
            self._seconds = before + 0.1 * (min(seconds, 3.0 * before) - before)


def _size(promise: float) -> int:
    return bisect_right(_BOUNDS, promise)
