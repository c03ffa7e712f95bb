"""Ratios of two arms that saw the same traffic in blocks: a paired, clustered bootstrap.

A block is what one start of each server took; starts of one build differ by 5-10 %, so blocks, not
requests, are what is drawn again, and both arms' shares of a block are drawn together. The
interval is on the logarithm of the ratio: bootstrap standard error, widened for few blocks by
sqrt(C / (C - 1)) and Student's t with C - 1 degrees of freedom (as Hesterberg 2015 advises).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import (
    LEVEL,
    Floats,
    Interval,
    student_quantile,
    unknown,
)

Ints = NDArray[np.int64]
RESAMPLES = 1000
FEWEST_BLOCKS = 3
TAIL_VALUES = 10
"""Values beyond a quantile, per arm, before its bootstrap is worth something."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Values of one arm and the block each came from."""

    values_N: Floats
    blocks_N: Ints

    def __post_init__(self) -> None:
        """Check the lengths."""
        given = (self.values_N.shape, self.blocks_N.shape)
        assert self.values_N.shape == self.blocks_N.shape, given

    def known(self) -> "Sample":
        """Without NaN values."""
        keep_N = np.isfinite(self.values_N)
        return Sample(self.values_N[keep_N], self.blocks_N[keep_N])


Statistic = Callable[[Floats, Floats], Floats]
"""From values (N) and weights (R, N) to one number per row of weights (R)."""


def weighted_quantile(q: float) -> Statistic:
    """The statistic "quantile q": interpolated between the middles of the weights' steps."""

    def compute(values_N: Floats, weights_RN: Floats) -> Floats:
        order_N = np.argsort(values_N, kind="stable")
        values_N, weights_RN = values_N[order_N], weights_RN[:, order_N]
        sums_RN = np.cumsum(weights_RN, axis=1)
        wanted_R = q * (sums_RN[:, -1] - 1.0)
        # Position j of the resampled, sorted values; its two neighbours, as np.quantile has them.
        low_R, part_R = np.floor(wanted_R), wanted_R - np.floor(wanted_R)
        first_R = (sums_RN <= low_R[:, None]).sum(axis=1)
        second_R = (sums_RN <= low_R[:, None] + 1.0).sum(axis=1)
        last = values_N.size - 1
        low_values_R = values_N[np.minimum(first_R, last)]
        high_values_R = values_N[np.minimum(second_R, last)]
        high_values_R = np.where(part_R > 0, high_values_R, low_values_R)
        quantiles_R: Floats = low_values_R + part_R * (high_values_R - low_values_R)
        return quantiles_R

    return compute


def weighted_mean(values_N: Floats, weights_RN: Floats) -> Floats:
    """The statistic "mean"."""
    means_R: Floats = weights_RN @ values_N / weights_RN.sum(axis=1)
    return means_R


def paired_ratio(
    top: Sample,
    bottom: Sample,
    statistic: Statistic,
    *,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """Interval of statistic(top) / statistic(bottom), paired by block.

    Blocks that only one arm has are left out. Fewer than three common blocks give an estimate with
    unknown ends.
    """
    top, bottom = top.known(), bottom.known()
    common = np.intersect1d(top.blocks_N, bottom.blocks_N)
    if common.size == 0:
        return unknown(level=level)
    pair = [_on_blocks(sample, common) for sample in (top, bottom)]
    points = [float(statistic(s.values_N, np.ones((1, s.values_N.size)))[0]) for s in pair]
    if min(points) <= 0:
        return unknown(level=level)
    if common.size < FEWEST_BLOCKS:
        return unknown(points[0] / points[1], level)
    weights_RC = block_weights(common.size, RESAMPLES, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = [np.log(statistic(s.values_N, weights_RC[:, s.blocks_N])) for s in pair]
    center = math.log(points[0] / points[1])
    return _log_interval(center, logs[0] - logs[1] - center, common.size, level)


def block_weights(num_blocks: int, resamples: int, seed: int) -> Floats:
    """How often each block is drawn, per resample: (R, C), rows sum to C."""
    rng = np.random.default_rng(seed)
    shares = np.full(num_blocks, 1.0 / num_blocks)
    return rng.multinomial(num_blocks, shares, size=resamples).astype(np.float64)


def _on_blocks(sample: Sample, common: Ints) -> Sample:
    keep_N = np.isin(sample.blocks_N, common)
    return Sample(sample.values_N[keep_N], np.searchsorted(common, sample.blocks_N[keep_N]))


def _log_interval(center: float, deviations_R: Floats, num_blocks: int, level: float) -> Interval:
    finite_R = deviations_R[np.isfinite(deviations_R)]
    spread = float(np.std(finite_R, ddof=1)) * math.sqrt(num_blocks / (num_blocks - 1))
    half = student_quantile(1 - (1 - level) / 2, num_blocks - 1) * spread
    return Interval(math.exp(center), math.exp(center - half), math.exp(center + half), level)


def clustered_interval(
    sample: Sample, statistic: Statistic, *, level: float = LEVEL, seed: int = 0
) -> Interval:
    """Interval of one arm's positive statistic, blocks as clusters."""
    sample = sample.known()
    blocks = np.unique(sample.blocks_N)
    if blocks.size == 0:
        return unknown(level=level)
    point = float(statistic(sample.values_N, np.ones((1, sample.values_N.size)))[0])
    if blocks.size < FEWEST_BLOCKS or point <= 0:
        return unknown(point, level)
    own = _on_blocks(sample, blocks)
    weights_RC = block_weights(blocks.size, RESAMPLES, seed)
    with np.errstate(divide="ignore"):
        logs_R = np.log(statistic(own.values_N, weights_RC[:, own.blocks_N]))
    return _log_interval(math.log(point), logs_R - math.log(point), blocks.size, level)


def standard_error(interval: Interval, num_blocks: int) -> float:
    """Standard error of the logarithm that an interval of this module was made from."""
    if not interval.known or num_blocks < FEWEST_BLOCKS or interval.low <= 0:
        return math.nan
    t = student_quantile(1 - (1 - interval.level) / 2, num_blocks - 1)
    return math.log(interval.high / interval.low) / (2 * t)


def at_level(interval: Interval, num_blocks: int, level: float) -> Interval:
    """An interval of this module at another level, for instance that of a later look."""
    error = standard_error(interval, num_blocks)
    if not math.isfinite(error):
        return unknown(interval.estimate, level)
    half = student_quantile(1 - (1 - level) / 2, num_blocks - 1) * error
    center = math.log(interval.estimate)
    return Interval(interval.estimate, math.exp(center - half), math.exp(center + half), level)


def supports_quantile(sample: Sample, q: float) -> bool:
    """Whether enough values lie beyond quantile `q` for its bootstrap to mean something."""
    return sample.known().values_N.size * min(q, 1 - q) >= TAIL_VALUES


def blocks_for_width(interval: Interval, num_blocks: int, relative: float) -> int | None:
    """Blocks for an interval of +-`relative`, from the spread seen; None if it is not known."""
    error = standard_error(interval, num_blocks)
    if not math.isfinite(error):
        return None
    spread, distance = error * math.sqrt(num_blocks), math.log1p(relative)
    for blocks in range(FEWEST_BLOCKS, 2000):
        t = student_quantile(1 - (1 - interval.level) / 2, blocks - 1)
        if t * spread / math.sqrt(blocks) <= distance:
            return blocks
    return None


def level_of_look(level: float, look: int) -> float:
    """Level to use at the `look`-th judgement of one experiment, from 1, any number of them.

    The error 1 - level is shared out as 1 / (j (j + 1)), which sums to 1: whatever the number of
    looks, all intervals together hold with probability `level` (union bound).
    """
    assert look >= 1, look
    return 1 - (1 - level) / (look * (look + 1))
