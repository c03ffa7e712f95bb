"""The system's break-even, fitted to the step times that both arms of an A/B showed.

A step of the candidate costs V + k c plain steps and yields 1 + k r tokens, so speculation breaks
even at r* = (V + k c - 1) / k = (V - 1) / k + c, at every batch size. Step times are lines in the
batch size; where the cost meets the yield is the crossover. Intervals draw blocks again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.analysis.steps import StepTimes, step_times, without_prompts
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import LEVEL, Floats, Interval, unknown
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    Ints,
    Sample,
    block_weights,
    paired_ratio,
    weighted_quantile,
)

RESAMPLES = 1000
FEWEST_STEPS = 20
RAREST_BATCH = 0.02
"""Steps per arm at a batch size before it gets a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    """One batch size that both arms were seen at."""

    batch: int
    rows: int
    """batch x (1 + k): rows of a verification."""
    num_steps: int
    cost: Interval
    """V + k c: a step of the candidate over one of the baseline."""
    break_even: Interval
    """r*: draft acceptance rate at which speculation neither gains nor loses."""
    speedup: Interval
    """(1 + k r) over the cost, at the measured rate r."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What `foretoken lab fit` finds."""

    k: float
    """Mean drafts per step."""
    acceptance_rate: float
    points: tuple[FitPoint, ...]
    draft_cost: Interval
    """c, in plain steps of batch 1, if V is what the baseline's line says of so many rows."""
    verify_cost: Interval
    """V at batch 1, in the same way."""
    crossover_batch: Interval
    """Batch at which cost and yield meet; infinite: never."""
    crossover_qps: Interval
    """Requests per second of the baseline at that batch."""
    notes: tuple[str, ...]


def fit_arms(base: Sequence[RequestRecord], other: Sequence[RequestRecord]) -> Fit:
    """The fit of a plain baseline's and a speculating candidate's whole answers.

    Raises:
        ConfigError: there are no step times, or the candidate's acceptance is not known.
    """
    off, on = without_prompts(step_times(base), step_times(other))
    if off.seconds_N.size == 0 or on.seconds_N.size == 0:
        raise ConfigError("run", "no chunk times", "a streamed A/B of both arms")
    k, rate = _drafting(other)
    common = np.intersect1d(np.unique(off.batch_N), np.unique(on.batch_N))
    points = [_point(int(b), off, on, k, rate) for b in common]
    lines = _Lines(off, on, k, rate, _mean_tokens(base))
    notes = []
    if lines.one_batch:
        notes.append("one batch size only: no crossover; measure at two loads or more")
    if lines.verify_costs[0] < 1 or lines.draft_costs[0] < 0:
        notes.append("V below 1 or c below 0: plain steps do not get longer with their batch here, "
                     "as where they wait for prompts; measure at two loads")  # fmt: skip
    if np.unique(off.blocks_N).size < FEWEST_BLOCKS:
        notes.append(f"fewer than {FEWEST_BLOCKS} blocks: no intervals")
    return Fit(
        k=k,
        acceptance_rate=rate,
        points=tuple(p for p in points if p is not None),
        draft_cost=lines.interval(lines.draft_costs),
        verify_cost=lines.interval(lines.verify_costs),
        crossover_batch=lines.interval(lines.crossovers),
        crossover_qps=lines.interval(lines.crossover_rates),
        notes=tuple(notes),
    )


def _drafting(records: Sequence[RequestRecord]) -> tuple[float, float]:
    found = [r.acceptance for r in records if r.acceptance is not None and r.acceptance.num_steps]
    drafted, accepted = sum(a.num_drafted for a in found), sum(a.num_accepted for a in found)
    steps = sum(a.num_steps or 0 for a in found)
    if not steps or not drafted:
        raise ConfigError("run", "no acceptance", "a candidate whose answers tell about its drafts")
    return drafted / steps, accepted / drafted


def least_steps(steps: StepTimes) -> float:
    """Steps below which a batch was only passed through, as when a block ends."""
    return max(FEWEST_STEPS, RAREST_BATCH * steps.seconds_N.size)


def _mean_tokens(records: Sequence[RequestRecord]) -> float:
    tokens = [r.output_tokens for r in records if r.output_tokens]
    return float(np.mean(tokens)) if tokens else math.nan


def _point(batch: int, off: StepTimes, on: StepTimes, k: float, rate: float) -> FitPoint | None:
    own = off.at(batch), on.at(batch)
    if any(s.at(batch).seconds_N.size < least_steps(s) for s in (off, on)):
        return None
    top, bottom = (Sample(s.seconds_N, s.blocks_N) for s in (own[1], own[0]))
    cost = paired_ratio(top, bottom, weighted_quantile(0.5))
    gain = 1 + k * rate
    return FitPoint(
        batch=batch,
        rows=round(batch * (1 + k)),
        num_steps=int(min(s.seconds_N.size for s in own)),
        cost=cost,
        break_even=Interval((cost.estimate - 1) / k, (cost.low - 1) / k, (cost.high - 1) / k),
        speedup=Interval(gain / cost.estimate, gain / cost.high, gain / max(cost.low, 1e-9)),
    )


class _Lines:
    """Both arms' step times as lines in the batch, once whole (row 0) and once per resample."""

    def __init__(self, off: StepTimes, on: StepTimes, k: float, rate: float, tokens: float) -> None:
        blocks = np.intersect1d(off.blocks_N, on.blocks_N)
        self.num_blocks = int(blocks.size)
        weights_RC = np.vstack(
            [np.ones((1, blocks.size)), block_weights(max(blocks.size, 1), RESAMPLES, 0)]
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            off_R2 = _fit_lines(_cells(off, blocks), weights_RC)
            on_R2 = _fit_lines(_cells(on, blocks), weights_RC)
            self.one_batch = bool(np.isnan(off_R2[0, 1]) or np.isnan(on_R2[0, 1]))
            plain_R = off_R2 @ np.array([1.0, 1.0])
            self.verify_costs = off_R2 @ np.array([1.0, 1.0 + k]) / plain_R
            self.draft_costs = (on_R2 @ np.array([1.0, 1.0]) / plain_R - self.verify_costs) / k
            gain = 1 + k * rate
            # on(b) = gain * off(b) at the crossover; below it speculation pays.
            slack_R = gain * off_R2[:, 0] - on_R2[:, 0]
            slope_R = on_R2[:, 1] - gain * off_R2[:, 1]
            crossings_R = np.where(slope_R > 0, slack_R / slope_R, np.inf)
            self.crossovers = np.where(slack_R <= 0, 0.0, crossings_R)
            self.crossovers[np.isnan(slope_R)] = np.nan
            steps_R = off_R2[:, 0] + off_R2[:, 1] * self.crossovers
            self.crossover_rates = np.where(
                np.isinf(self.crossovers), np.inf, self.crossovers / (steps_R * tokens)
            )

    def interval(self, values_R: Floats) -> Interval:
        """The whole sample's value between quantiles of the resamples'."""
        point = float(values_R[0])
        rest_R = values_R[1:][~np.isnan(values_R[1:])]
        if self.num_blocks < FEWEST_BLOCKS or rest_R.size < RESAMPLES // 2 or math.isnan(point):
            return unknown(point)
        ordered_R = np.sort(rest_R)
        tail = (1 - LEVEL) / 2
        low = float(ordered_R[int(tail * ordered_R.size)])
        high = float(ordered_R[min(int((1 - tail) * ordered_R.size), ordered_R.size - 1)])
        return Interval(point, min(low, point), max(high, point))


def _cells(steps: StepTimes, blocks: Ints) -> Floats:
    """Median step time of each (block, batch): rows of block index, batch, seconds, weight."""
    rows = []
    for index, block in enumerate(blocks):
        own = steps.blocks_N == block
        for batch in np.unique(steps.batch_N[own]):
            times = steps.seconds_N[own & (steps.batch_N == batch)]
            if times.size >= 5:
                rows.append((index, float(batch), float(np.median(times)), float(times.size)))
    return np.array(rows, np.float64).reshape(-1, 4)


def _fit_lines(cells_M4: Floats, weights_RC: Floats) -> Floats:
    """Weighted least squares per row of block weights: (R, 2) of base and slope."""
    if cells_M4.shape[0] < 2:
        return np.full((weights_RC.shape[0], 2), np.nan)
    block_M, batch_M, seconds_M, count_M = cells_M4.T
    w_RM = weights_RC[:, block_M.astype(np.int64)] * count_M
    total_R = w_RM.sum(axis=1)
    x_R, y_R = w_RM @ batch_M / total_R, w_RM @ seconds_M / total_R
    xx_R = w_RM @ batch_M**2 / total_R - x_R**2
    xy_R = w_RM @ (batch_M * seconds_M) / total_R - x_R * y_R
    slope_R = np.where(xx_R > 1e-9, xy_R / xx_R, np.nan)
    return np.stack([y_R - slope_R * x_R, slope_R], axis=1)
