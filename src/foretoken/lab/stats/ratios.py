"""Ratios of two arms that saw the same traffic in blocks: a paired, clustered bootstrap.

A block is what one start of each server took; starts of one build differ by 5-10 %, so blocks, not
requests, are what is drawn again, and both arms' shares of a block are drawn together. The
interval is on the logarithm of the ratio: bootstrap standard error, widened for few blocks by
sqrt(C / (C - 1)) and Student's t with C - 1 degrees of freedom (as Hesterberg 2015 advises).

Where a server runs all along, its blocks share one start, and no number of blocks shows how much
starts differ. That spread is then a prior, `Interval.unseen_sd`: half widths of what is seen and
of what is not are added in squares (Zou and Donner 2008).
"""

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import (
    LEVEL,
    Floats,
    Interval,
    normal_quantile,
    student_quantile,
    unknown,
)

Ints = NDArray[np.int64]
RESAMPLES = 1000
FEWEST_BLOCKS = 3
TAIL_VALUES = 10
"""Values beyond a quantile, per arm, before its bootstrap is worth something."""
TAIL_OF_BLOCK = 3
"""Values beyond a quantile in every block, before it is compared block by block."""
MOST_BLOCKS = 2000
RESTART_SD = 0.05
"""Prior for the logarithm of a start's speed: starts of one build differ by 5 % and more."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one arm and the block each came from."""

    values_N: Floats
    blocks_N: Ints

    def __post_init__(self) -> None:
        assert self.values_N.shape == self.blocks_N.shape, (
            self.values_N.shape,
            self.blocks_N.shape,
        )

    def known(self) -> "Sample":
        """Without NaN values."""
        keep_N = np.isfinite(self.values_N)
        return Sample(self.values_N[keep_N], self.blocks_N[keep_N])


Statistic = Callable[[Floats, Floats], Floats]
"""From values (N) and weights (R, N) to one number per row of weights (R)."""


@dataclass(frozen=True, slots=True)
class WeightedQuantile:
    """The statistic "quantile q": interpolated between the middles of the weights' steps."""

    q: float

    def __call__(self, values_N: Floats, weights_RN: Floats) -> Floats:
        return self.of_blocks(Sample(values_N, np.arange(values_N.size)), weights_RN)

    def of_blocks(self, sample: Sample, weights_RC: Floats) -> Floats:
        """Quantile per row of whole weights of blocks."""
        order_N = np.argsort(sample.values_N, kind="stable")
        values_N, blocks_N = sample.values_N[order_N], sample.blocks_N[order_N]
        # Values of each block among the first n: a row of weights then has its sums by one
        # product, and its quantile by halving, without a matrix of resamples times values.
        counts_NC = np.zeros((values_N.size, weights_RC.shape[1]))
        counts_NC[np.arange(values_N.size), blocks_N] = 1.0
        counts_NC = np.cumsum(counts_NC, axis=0)
        wanted_R = self.q * (weights_RC @ counts_NC[-1] - 1.0)
        low_R = np.floor(wanted_R)
        part_R = wanted_R - low_R
        low_values_R = values_N[_first_above(counts_NC, weights_RC, low_R)]
        high_values_R = values_N[_first_above(counts_NC, weights_RC, low_R + 1.0)]
        high_values_R = np.where(part_R > 0, high_values_R, low_values_R)
        quantiles_R: Floats = low_values_R + part_R * (high_values_R - low_values_R)
        return quantiles_R


def _first_above(counts_NC: Floats, weights_RC: Floats, wanted_R: Floats) -> Ints:
    """First place per row at which the sum of weights exceeds what is wanted; else the last."""
    low_R = np.zeros(wanted_R.size, np.int64)
    high_R = np.full(wanted_R.size, counts_NC.shape[0] - 1)
    while bool((low_R < high_R).any()):
        middle_R = (low_R + high_R) // 2
        above_R = (weights_RC * counts_NC[middle_R]).sum(axis=1) > wanted_R
        high_R = np.where(above_R, middle_R, high_R)
        low_R = np.where(above_R, low_R, np.minimum(middle_R + 1, high_R))
    return low_R


def weighted_mean(values_N: Floats, weights_RN: Floats) -> Floats:
    means_R: Floats = weights_RN @ values_N / weights_RN.sum(axis=1)
    return means_R


def of_blocks(statistic: Statistic, sample: Sample, weights_RC: Floats) -> Floats:
    """The statistic per row of weights of blocks."""
    if isinstance(statistic, WeightedQuantile):
        return statistic.of_blocks(sample, weights_RC)
    if statistic is weighted_mean:
        size = weights_RC.shape[1]
        sums_C = np.bincount(sample.blocks_N, sample.values_N, size)
        counts_C = np.bincount(sample.blocks_N, None, size)
        means_R: Floats = weights_RC @ sums_C / (weights_RC @ counts_C)
        return means_R
    return statistic(sample.values_N, weights_RC[:, sample.blocks_N])


def whole(statistic: Statistic, sample: Sample) -> float:
    """The statistic of all values of a sample whose blocks are counted from 0."""
    if isinstance(statistic, WeightedQuantile):
        return float(np.quantile(sample.values_N, statistic.q))
    return float(of_blocks(statistic, sample, np.ones((1, int(sample.blocks_N.max()) + 1)))[0])


def paired_ratio(
    top: Sample,
    bottom: Sample,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    seed: int = 0,
    unseen_sd: float = 0.0,
) -> Interval:
    """Interval of statistic(top) / statistic(bottom), paired by block. Blocks that only one arm has
    are left out. Fewer than three common blocks give an estimate with unknown ends. `unseen_sd` is
    what the logarithm of the ratio varies by and no block shows."""
    top, bottom = top.known(), bottom.known()
    common = np.intersect1d(top.blocks_N, bottom.blocks_N)
    pair = [_on_blocks(sample, common) for sample in (top, bottom)]
    points = [whole(statistic, sample) if common.size else 0.0 for sample in pair]
    if min(points) <= 0:
        return unknown(level=level)
    if common.size < FEWEST_BLOCKS:
        return unknown(points[0] / points[1], level)
    weights_RC = block_weights(common.size, RESAMPLES, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = [np.log(of_blocks(statistic, s, weights_RC)) for s in pair]
    center = math.log(points[0] / points[1])
    error = _error(logs[0] - logs[1] - center, common.size)
    return log_interval(center, error, common.size, level, unseen_sd)


def ratio_of_blocks(ratios_C: Floats, *, unseen_sd: float = 0.0) -> Interval:
    """Student's interval of the mean logarithm of every block's own ratio. For tails: the quantile
    of all values together is that of the few slowest starts."""
    logs_C = np.log(ratios_C[np.isfinite(ratios_C) & (ratios_C > 0)])
    if logs_C.size < FEWEST_BLOCKS:
        return unknown(math.exp(float(logs_C.mean())) if logs_C.size else math.nan)
    error = float(logs_C.std(ddof=1)) / math.sqrt(logs_C.size)
    return log_interval(float(logs_C.mean()), error, logs_C.size, LEVEL, unseen_sd)


@lru_cache(maxsize=128)
def block_weights(num_blocks: int, resamples: int, seed: int) -> Floats:
    """How often each block is drawn, per resample: (R, C), rows sum to C; not to be written to."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_blocks, 1.0 / num_blocks)
    weights_RC: Floats = rng.multinomial(num_blocks, shares, size=resamples).astype(np.float64)
    weights_RC.setflags(write=False)
    return weights_RC


def _on_blocks(sample: Sample, common: Ints) -> Sample:
    keep_N = np.isin(sample.blocks_N, common)
    return Sample(sample.values_N[keep_N], np.searchsorted(common, sample.blocks_N[keep_N]))


def _error(deviations_R: Floats, num_blocks: int) -> float:
    """Standard error out of resamples, which scatter a little less than fresh blocks would."""
    finite_R = deviations_R[np.isfinite(deviations_R)]
    return float(np.std(finite_R, ddof=1)) * math.sqrt(num_blocks / (num_blocks - 1))


def log_interval(
    center: float, error: float, num_blocks: int, level: float = LEVEL, unseen_sd: float = 0.0
) -> Interval:
    """Interval of exp(center), whose standard error was estimated from so many blocks."""
    half = _half(error, num_blocks, level, unseen_sd)
    estimate, low, high = (math.exp(x) for x in (center, center - half, center + half))
    return Interval(estimate, low, high, level, unseen_sd)


def _half(error: float, num_blocks: float, level: float, unseen_sd: float) -> float:
    p = 1 - (1 - level) / 2
    seen = student_quantile(p, int(num_blocks) - 1) * error
    return math.hypot(seen, normal_quantile(p) * unseen_sd) if unseen_sd else seen


def clustered_interval(sample: Sample, statistic: Statistic) -> Interval:
    """Interval of one arm's positive statistic, blocks as clusters."""
    sample = sample.known()
    blocks = np.unique(sample.blocks_N)
    if blocks.size == 0:
        return unknown()
    own = _on_blocks(sample, blocks)
    point = whole(statistic, own)
    if blocks.size < FEWEST_BLOCKS or point <= 0:
        return unknown(point)
    weights_RC = block_weights(blocks.size, RESAMPLES, 0)
    with np.errstate(divide="ignore"):
        logs_R = np.log(of_blocks(statistic, own, weights_RC))
    error = _error(logs_R - math.log(point), blocks.size)
    return log_interval(math.log(point), error, blocks.size)


def standard_error(interval: Interval, num_blocks: int) -> float:
    """Standard error of the logarithm, as the blocks show it, of an interval of this module."""
    if not interval.known or num_blocks < FEWEST_BLOCKS or interval.low <= 0:
        return math.nan
    half, p = math.log(interval.high / interval.low) / 2, 1 - (1 - interval.level) / 2
    seen = half**2 - (normal_quantile(p) * interval.unseen_sd) ** 2
    return math.sqrt(max(0.0, seen)) / student_quantile(p, num_blocks - 1)


def at_level(interval: Interval, num_blocks: int, level: float) -> Interval:
    """An interval of this module at another level, for instance that of a later look."""
    error = standard_error(interval, num_blocks)
    if not math.isfinite(error):
        return unknown(interval.estimate, level)
    center = math.log(interval.estimate)
    return log_interval(center, error, num_blocks, level, interval.unseen_sd)


def supports_quantile(sample: Sample, q: float) -> bool:
    """Whether enough values lie beyond quantile `q` for its bootstrap to mean something."""
    return sample.known().values_N.size * min(q, 1 - q) >= TAIL_VALUES


def supports_blocks(sample: Sample, q: float) -> bool:
    """Whether `q` is a tail that every block has values enough for."""
    counts = np.unique(sample.blocks_N, return_counts=True)[1]
    return q >= 0.9 and min(counts.tolist(), default=0) * (1 - q) >= TAIL_OF_BLOCK


def blocks_to_exceed(
    spread: float,
    unseen_sd: float,
    distance: float,
    chances: tuple[float, float],
    fewest: int = FEWEST_BLOCKS,
) -> int | None:
    """Blocks after which the interval of a truth so far from a limit leaves it out. `spread` is
    that of one block; `chances` are the interval's level and the chance of success. None if no
    number of blocks does: starts that blocks do not show are then all that is left."""
    level, power = chances
    behind = normal_quantile(power)

    def enough(blocks: int) -> bool:
        error = spread / math.sqrt(blocks)
        reach = _half(error, blocks, level, unseen_sd) + behind * math.hypot(error, unseen_sd)
        return reach <= distance

    # The normal's quantile is below Student's, so no fewer blocks than by it are enough.
    z = normal_quantile(1 - (1 - level) / 2)
    if distance <= (z + behind) * unseen_sd:
        return None
    least = max(fewest, math.floor(((z + behind) * spread / distance) ** 2))
    found = bisect_left(range(least, MOST_BLOCKS + 1), True, key=enough)
    return least + found if least + found <= MOST_BLOCKS else None


def level_of_look(level: float, look: int) -> float:
    """Level to use at the `look`-th judgement of one experiment, from 1, any number of them. The
    error 1 - level is shared out as 1 / (j (j + 1)), which sums to 1: whatever the number of looks,
    all intervals together hold with probability `level` (union bound)."""
    assert look >= 1, look
    return 1 - (1 - level) / (look * (look + 1))
