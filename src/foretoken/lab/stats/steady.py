"""Where a run has settled, and whether it ever did.

Pure functions over values in order of time. A slow start of every block is found in the course of
the median over blocks, and cut from everything that is measured. Whether a run is steady is asked
after a cut by MSER-5 (White 1997): the one after which the mean of what is left is known best. A
run whose batch means still climb or fall then has no steady state, and its means depend on how
long it was.
"""

import math
import warnings
from dataclasses import dataclass

import numpy as np

from foretoken.lab.stats.intervals import Floats, student_quantile

BATCH = 5
"""Values averaged before the cut is looked for, as in MSER-5."""
BATCHES_OF_DRIFT = 10
MOST_DRIFT = 0.25
FEWEST_PLACES = 20
"""Requests of a block below which no start can be told from the rest."""
WINDOW = 3
"""Neighbouring requests whose mean is held against the rest of the block."""
NEGLIGIBLE = 0.01
"""Share of a time below which a slow start is left in."""
SURE = 0.9987
"""Chance that a start which is like the rest is not cut, one-sided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """Change over a run, as a share of its mean."""

    change: float
    significant: bool
    """At 1 %, two-sided."""


def start_length(logs_CN: Floats, *, either_way: bool = False) -> int:
    """How many first places of all blocks are slower than the rest; at most half of them.

    `logs_CN` are logarithms by block and place, NaN where there is none. With `either_way` a start
    that is faster counts too, as in a ratio of two arms. More is cut than can be seen, twice as
    much at least: what decays is still there after it has sunk into the noise, and goes on at the
    rate at which it was seen to decay until it is `NEGLIGIBLE`.
    """
    if logs_CN.size == 0 or logs_CN.shape[1] < FEWEST_PLACES:
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        course_N = np.nanmedian(logs_CN, axis=0)
    half = course_N.size // 2
    rest = course_N[half:][np.isfinite(course_N[half:])]
    if rest.size < WINDOW:
        return 0
    middle = float(np.median(rest))
    spread = 1.4826 * float(np.median(np.abs(rest - middle)))
    above_N = np.convolve(course_N - middle, np.full(WINDOW, 1 / WINDOW), "valid")
    # A median deviation of n values knows the spread about as well as 0.37 n would.
    sure = student_quantile(SURE, max(1, int(0.37 * rest.size)))
    apart_N, least = np.abs(above_N) if either_way else above_N, sure * spread / math.sqrt(WINDOW)
    differs_N = apart_N > least
    seen = int(np.argmin(differs_N[:half])) if not differs_N[:half].all() else half
    if not seen or least <= 0:
        return min(2 * seen, half)
    rate = math.log(max(float(apart_N[0]), 1.05 * least) / least) / seen
    unseen = max(0.0, math.log(least / NEGLIGIBLE)) / rate
    return min(max(2 * seen, math.ceil(seen + unseen)), half)


def warm_up_length(values_N: Floats) -> int:
    """How many first values to leave out; at most half of them, a multiple of five."""
    batches = values_N.size // BATCH
    if batches < 4:
        return 0
    means_B = values_N[: batches * BATCH].reshape(batches, BATCH).mean(axis=1)
    # Mean square error of the mean of what is left, for every cut, from the end backwards.
    left_B = np.arange(batches, 0, -1.0)
    sums_B = np.cumsum(means_B[::-1])[::-1]
    squares_B = np.cumsum(means_B[::-1] ** 2)[::-1]
    errors_B = (squares_B - sums_B**2 / left_B) / left_B**2
    return int(np.argmin(errors_B[: batches // 2 + 1])) * BATCH


def measure_drift(values_N: Floats) -> Drift:
    """Slope of ten batch means over the run, times its length, over the mean."""
    if values_N.size < 2 * BATCHES_OF_DRIFT:
        return Drift(change=0.0, significant=False)
    means_B = np.array([part.mean() for part in np.array_split(values_N, BATCHES_OF_DRIFT)])
    times_B = np.linspace(-0.5, 0.5, BATCHES_OF_DRIFT)
    slope = float((times_B * means_B).sum() / (times_B**2).sum())
    left_B = means_B - means_B.mean() - slope * times_B
    error = math.sqrt(float((left_B**2).sum()) / (BATCHES_OF_DRIFT - 2) / float((times_B**2).sum()))
    mean = float(means_B.mean())
    t = student_quantile(0.995, BATCHES_OF_DRIFT - 2)
    return Drift(change=slope / mean if mean else 0.0, significant=abs(slope) > t * error)


def is_steady(values_N: Floats) -> bool:
    """Whether what follows the warm-up changes by less than MOST_DRIFT, or only by chance."""
    drift = measure_drift(values_N[warm_up_length(values_N) :])
    return not (drift.significant and abs(drift.change) > MOST_DRIFT)
