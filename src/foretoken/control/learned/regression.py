"""Seconds as a sum of features with coefficients that are never negative, learnt while running.

Knows neither models nor drafters. A Bayesian linear regression in relative noise: a prior of
shapes with known seconds, to which whatever is not measured again slowly returns. How fast the
whole machine is at the moment (`level`) is kept apart from the coefficients: a neighbour that
halves the speed of everything changes one number within eight steps and no ratio of costs.

Runs inside steps of half a millisecond: an observation is a few Python operations, and NumPy works
only once every `LEAST_BATCH` to `MOST_BATCH` of them.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LEAST_BATCH, MOST_BATCH = 16, 128
"""Observations between two fits: few while something is new, many while nothing is. So many steps
are learnt together at the least, those of a shape by their mean."""
_KEEPS = 0.998
"""Share of what is known that remains at each observation; the rest returns to the prior."""
NOISE = 0.1
"""Relative noise of a measurement, before it is known."""
_LEAST_NOISE, _MOST_NOISE = 0.02, 0.5
OUTLIER = 3.0
"""Standard deviations from which on a measurement counts less (Huber)."""
_TIMES_MOST = 8
"""Measurements that one mean counts for at most."""
WINDOW = 15
"""Measurements whose median shows that the machine is faster or slower all at once."""
_SEEN_AFTER = WINDOW // 2 + 1
"""Measurements after which such a change is seen."""
_FOLLOWS = 1.0 / 32.0
"""Share of what a measurement is off by that the level follows."""
_MOST_LEVEL = math.log(16.0)
_REMEMBERED = 256
"""Errors that are kept to report them, and fits of which the level is, to tell the usual one."""
_UNEXPECTED = 256.0
"""Times what was expected, from which on a step tells nothing of how sure that was."""
_JITTER = 1e-9
"""Added to a diagonal of ones before a matrix is solved."""
_RIDGE = 1e-5
"""Weight of "a coefficient is zero", as a share of what the prior knows of it."""
_SMOOTH_SD = 20.0
"""How weakly neighbouring slopes are held together, in standard deviations of the prior."""


@final
class Learner:
    """Coefficients, level and noise, from a prior and from what was measured.

    `covariance` is that of the coefficients, in seconds squared. All of it at level 1, i.e. at the
    speed that the machine had when the prior was measured.
    """

    __slots__ = (
        "_buffer", "_due", "_errors", "_features", "_free", "_interval", "_known", "_levels",
        "_levels_then", "_log_level", "_moments", "_new", "_precision", "_prior", "_ratios",
        "coefficients", "count", "covariance", "noise",
    )  # fmt: skip

    def __init__(
        self,
        features: Callable[[Floats], Floats],
        prior: Sequence[tuple[tuple[float, ...], float]],
        *,
        sd: float,
        slopes: range,
        knots: Sequence[float],
    ) -> None:
        """Know that the shapes of `prior` take so many seconds, each give or take the share `sd`.

        `features` makes columns [N, P] of shapes [N, F]. The columns `slopes` belong to segments
        that begin at `knots`; where nothing is known of one, it has its neighbour's slope.
        """
        assert prior, "a prior needs at least one shape"
        self._features = features
        seconds_N = np.array([seconds for _, seconds in prior], dtype=np.float64)
        assert (seconds_N > 0.0).all(), f"seconds of a prior must be above 0: {seconds_N.min()}"
        columns_NP = features(np.array([shape for shape, _ in prior], dtype=np.float64))
        self._prior = _prior_of(columns_NP, seconds_N, sd, slopes, knots)
        self._precision, self._moments = self._prior[0].copy(), self._prior[1].copy()
        self._free = np.ones(len(self._moments), dtype=np.bool_)
        self.noise = NOISE
        self.count = 0
        self._buffer: list[tuple[float, ...]] = []
        self._interval = self._due = LEAST_BATCH
        self._log_level = 0.0
        self._levels_then: list[float] = []
        """Of each measurement in the buffer, the level before it."""
        self._ratios: deque[float] = deque(maxlen=WINDOW)
        self._levels: deque[float] = deque(maxlen=_REMEMBERED)
        self._errors: deque[float] = deque(maxlen=_REMEMBERED)
        self._known: set[int] = set()
        self._new: set[int] = set()
        self._solve()

    def widen(self, seconds: Mapping[int, float]) -> None:
        """Some coefficients may be larger or smaller by so many seconds than the prior says."""
        at = list(seconds)
        covariance = self.covariance.copy()
        covariance[at, at] += np.array([value * value for value in seconds.values()])
        precision = _inverse(covariance)
        moments = precision @ self.coefficients
        self._prior = precision, moments
        self._precision, self._moments = precision.copy(), moments.copy()
        self._solve()

    @property
    def level(self) -> float:
        """How many times as long as at the prior everything takes at the moment."""
        return math.exp(self._log_level)

    @property
    def error(self) -> tuple[float, float]:
        """Median and ninth decile of |log(measured / predicted)| of the last steps."""
        ordered = sorted(self._errors)
        if not ordered:
            return math.nan, math.nan
        return ordered[len(ordered) // 2], ordered[len(ordered) * 9 // 10]

    def describe(self) -> dict[str, float | None]:
        """How much was measured and how well it is predicted; errors None before anything was."""
        middle, high = self.error
        return {
            "steps": self.count,
            "noise": self.noise,
            "error_p50": None if math.isnan(middle) else middle,
            "error_p90": None if math.isnan(high) else high,
        }

    @property
    def usual_level(self) -> float:
        """The level of most fits: what to keep beyond this process. A neighbour that was busy
        lately does not move it."""
        ordered = sorted(self._levels)
        return math.exp(ordered[len(ordered) // 2]) if ordered else 1.0

    def observe(
        self,
        shape: tuple[float, ...],
        seconds: float,
        expected: float,
        region: int,
        *,
        times: int = 1,
    ) -> bool:
        """A shape took `seconds`, `expected` by the coefficients; whether these are new now.

        What was measured several `times` and is told by its mean counts for more: the level is that
        of most steps, not of most shapes.
        `region` names shapes that are alike: the level learns from those only that were fitted.
        Where nothing was fitted yet, the prior may be what is wrong.
        """
        if not 0.0 < seconds < math.inf:  # a clock that was set back
            return False
        ratio = math.log(seconds / max(expected, 1e-12))
        error = abs(ratio - self._log_level)
        self.count += 1
        times = min(times, _TIMES_MOST)
        self._buffer.append((*shape, seconds, times))
        self._levels_then.append(self._log_level)
        self._errors.append(error)
        if region in self._known:
            self._ratios.extend((ratio,) * times)
            allowed = OUTLIER * self.noise
            off = min(max(ratio - self._log_level, -allowed), allowed)
            self._move_level(self._log_level + off * (1.0 - (1.0 - _FOLLOWS) ** times))
            # Sorting takes as long as all the rest: it waits unless something seems to change.
            if error > OUTLIER * self.noise:
                # Soon it is known whether the machine changed or this shape: then is the time to
                # fit, and not before.
                self._due = min(len(self._buffer) + WINDOW // 2 + 1, 2 * MOST_BATCH)
                self._follow()
            elif not self.count % (WINDOW // 2):
                self._follow()
        elif region not in self._new:
            self._new.add(region)
            self._due = min(self._due, len(self._buffer) + LEAST_BATCH - 1)
        if len(self._buffer) < self._due:
            return False
        self._fit()
        return True

    def shift_level(self, times: float) -> None:
        """Everything takes `times` as long as when it was measured last, as others showed."""
        self._shift(math.log(times))

    def _follow(self) -> None:
        """The level is the median ratio where that is too far off to be chance."""
        num = len(self._ratios)
        if num <= WINDOW // 2:
            return
        median = sorted(self._ratios)[num // 2]
        if abs(median - self._log_level) > self._least_level(num):
            if abs(median - self._log_level) > OUTLIER * self.noise:
                # No cost is believed that wrong: it is the machine, since before it was seen.
                then = self._levels_then
                then[-_SEEN_AFTER:] = [median] * min(_SEEN_AFTER, len(then))
            self._move_level(median)

    def _least_level(self, num: int) -> float:
        """How far the median of so many measurements is off by more than chance."""
        return OUTLIER * 1.25 * self.noise / math.sqrt(num)

    def _shift(self, step: float) -> None:
        self._log_level += step
        self._ratios = deque((ratio + step for ratio in self._ratios), maxlen=WINDOW)

    def _move_level(self, log_level: float) -> None:
        self._log_level = min(max(log_level, -_MOST_LEVEL), _MOST_LEVEL)

    def _fit(self) -> None:
        """Take in the buffer: fade towards the prior, weigh, solve."""
        raw = np.array(self._buffer)
        columns_NP, seconds_N, times_N = self._features(raw[:, :-2]), raw[:, -2], raw[:, -1]
        # What takes hundreds of times as long as expected was not expected at all: weighed by an
        # expectation of nothing, it would count for more than everything else together.
        before_N = columns_NP @ self.coefficients
        expected_N = np.maximum(before_N, seconds_N / _UNEXPECTED)
        ratios_N = np.log(seconds_N / expected_N)
        # The level of a step is that before it. The one that it fits best would pass off as a fast
        # machine what is believed wrong of a shape that is seldom seen.
        levels_N = np.array(self._levels_then)
        if not self._known:
            # The first that is measured: what is wrong with all of it alike is the speed of the
            # machine, and the prior is right about the rest.
            self._move_level(_median(ratios_N))
            levels_N[:] = self._log_level
        over_N = ratios_N - levels_N
        doubt_N = ((columns_NP @ self.covariance) * columns_NP).sum(axis=1) / expected_N**2
        doubt_N = np.maximum(doubt_N, 0.0)
        allowed_N = OUTLIER * np.sqrt(doubt_N + self.noise**2)
        # Of a step that takes a hundred times as long, the logarithm alone would let 99 / log(100)
        # pass; what a step adds to the sums is bounded on both sides.
        far_N = np.maximum(np.abs(over_N), np.expm1(np.minimum(over_N, 50.0)))
        weights_N = np.minimum(1.0, allowed_N / np.maximum(far_N, 1e-9))
        weights_N *= times_N / (self.noise * expected_N) ** 2
        kept = _KEEPS ** len(raw)
        weighted_PN = columns_NP.T * weights_N
        if abs(self._log_level) < self._least_level(WINDOW):
            # Too little for a neighbour: a cost that is believed wrong, and the coefficients of
            # which least is known are to tell which.
            levels_N -= self._log_level
        self._precision *= kept
        self._precision += (1.0 - kept) * self._prior[0] + weighted_PN @ columns_NP
        self._moments *= kept
        self._moments += (1.0 - kept) * self._prior[1]
        self._moments += weighted_PN @ (seconds_N * np.exp(-levels_N))
        # Around their own middle: a level that is off would pass for noise, and noise is what a
        # level has to stand out from.
        measured = 1.48 * _median(np.abs(over_N - _median(over_N)))
        share = min(0.25, len(raw) / 64)
        self.noise += share * (min(max(measured, _LEAST_NOISE), _MOST_NOISE) - self.noise)
        self._solve()
        # What the coefficients have taken in is no more part of the level.
        now_N = np.maximum(columns_NP @ self.coefficients, 1e-12)
        taken = _median(np.log(now_N) - np.log(np.maximum(before_N, 1e-12)))
        self._shift(-taken)
        self._levels = deque((level - taken for level in self._levels), maxlen=_REMEMBERED)
        self._known |= self._new
        self._interval = LEAST_BATCH if self._new else min(2 * self._interval, MOST_BATCH)
        self._new.clear()
        self._levels.append(self._log_level)
        self._buffer.clear()
        self._levels_then.clear()
        self._due = self._interval

    def _solve(self) -> None:
        """The most likely coefficients that are not negative.

        Block principal pivoting (Portugal, Judice and Vicente 1994): those that came out negative
        are held at zero, those that would rather not be zero are let go, until none is wrong. It
        starts from the last answer, so that it mostly ends at once.
        """
        precision, moments = self._precision, self._moments
        scale, scaled = _scaled(precision)
        scaled_moments = scale * moments
        free, least_wrong = self._free, len(moments) + 1
        patience = 3
        for _ in range(3 * len(moments)):
            at = np.flatnonzero(free)
            found = np.zeros_like(moments)
            found[at] = scale[at] * np.linalg.solve(scaled[np.ix_(at, at)], scaled_moments[at])
            slope = precision @ found - moments
            wrong = np.flatnonzero(np.where(free, found < 0.0, slope < -1e-9 * np.abs(moments)))
            if not len(wrong):
                break
            # All at once is fast, one at a time is sure to end.
            patience = 3 if len(wrong) < least_wrong else patience - 1
            least_wrong = min(least_wrong, len(wrong))
            if patience <= 0:
                wrong = wrong[-1:]
            free[wrong] = ~free[wrong]
        self.coefficients: Floats = np.maximum(found, 0.0)
        self.covariance: Floats = _inverse(precision)


def _median(values_N: Floats) -> float:
    """The middle. `np.median` imports 10 ms of code at its first call; a request waits for it."""
    ordered_N, middle = np.sort(values_N), len(values_N) // 2
    return float(0.5 * (ordered_N[middle] + ordered_N[~middle]))


def _scaled(matrix: Floats) -> tuple[Floats, Floats]:
    """Scales [P], and a precision or covariance in units in which its diagonal is 1 and a little
    more: columns that say nearly the same make it singular in floating point."""
    scale: Floats = 1.0 / np.sqrt(np.diagonal(matrix))
    scaled: Floats = matrix * np.outer(scale, scale)
    scaled[np.diag_indices_from(scaled)] += _JITTER
    return scale, scaled


def _inverse(matrix: Floats) -> Floats:
    """Of a precision the covariance, and the other way round."""
    scale, scaled = _scaled(matrix)
    inverse: Floats = np.linalg.inv(scaled) * np.outer(scale, scale)
    return inverse


def _prior_of(
    columns_NP: Floats, seconds_N: Floats, sd: float, slopes: range, knots: Sequence[float]
) -> tuple[Floats, Floats]:
    """Precision [P, P] and moments [P] of what is known before anything is measured."""
    weighted_NP = columns_NP / (sd * seconds_N)[:, None]
    precision = weighted_NP.T @ weighted_NP
    moments = weighted_NP.T @ np.full(len(seconds_N), 1.0 / sd)
    slow = sd * float(seconds_N.max())
    # Columns that no shape of the prior has are left to what will be measured.
    diagonal = np.diagonal(precision)
    precision += np.diag(_RIDGE * np.where(diagonal > 0.0, diagonal, 1.0 / slow**2))
    for first, knot in zip(slopes[:-1], knots[1:], strict=False):
        weight = (knot / (_SMOOTH_SD * slow)) ** 2
        precision[first, first] += weight
        precision[first + 1, first + 1] += weight
        precision[first, first + 1] -= weight
        precision[first + 1, first] -= weight
    return precision, moments
