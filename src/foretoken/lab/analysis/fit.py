"""Step times out of arrivals, and the break-even fitted to those of both arms of an A/B.

Servers send a step's tokens in one chunk or in several at once; chunks that arrive together are one
step, and gaps between a request's steps are its times. A step beside which a prompt was read is
longer for that, and is told apart.

A step that drafts costs V + k c plain steps and yields 1 + k r tokens, so speculation breaks even
at r* = (V + k c - 1) / k = (V - 1) / k + c, at every batch size. Other steps are plain, and an
answer does not tell which: the mean over all steps and the share that drafts tell the two apart.
Mean step times are lines in the batch size; where the cost meets the yield is the crossover. Their
intervals leave out one block after the other, and have Student's t.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.lab.analysis.whole_time import (
    NOTHING_DRAFTED,
    StepCounts,
    break_even,
    counts_of_records,
)
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import LEVEL, Floats, Interval, student_quantile, unknown
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    Ints,
    Sample,
    jackknife_covariance,
    paired_ratio,
    quotient,
    weighted_mean,
)

TOGETHER_S = 0.0004
"""Chunks nearer than this, or than a share of the usual gap, are one step."""
_SHARE = 0.15
FEWEST_PURE = 200
"""Steps without prompts beside them, per arm, before the others can be left out."""
Bools = NDArray[np.bool_]


class StepTimes(NamedTuple):
    """One entry per step of any request of one arm."""

    seconds_N: Floats
    batch_N: Ints
    """Requests that were decoding in the middle of the step."""
    blocks_N: Ints
    mixed_N: Bools
    """Whether another request waited for its first token meanwhile, as far as is known."""

    def only(self, keep_N: Bools) -> "StepTimes":
        return StepTimes._make(values_N[keep_N] for values_N in self)


def step_times(records: Sequence[RequestRecord]) -> StepTimes:
    """The steps of an arm's records; requests without chunk times have none."""
    blocks: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.ok and len(record.chunk_s) > 1:
            blocks[record.block].append(record)
    none = np.array([], np.int64)
    parts = [StepTimes(np.array([]), none, none, np.array([], np.bool_))]
    parts += [_steps_of_block(number, found) for number, found in sorted(blocks.items())]
    return StepTimes(*map(np.concatenate, zip(*parts, strict=True)))


def without_prompts(off: StepTimes, on: StepTimes) -> tuple[StepTimes, StepTimes]:
    """Both arms' steps beside which no prompt was read; all of them if one arm has too few such."""
    pure = tuple(steps.only(~steps.mixed_N) for steps in (off, on))
    if any(steps.seconds_N.size < FEWEST_PURE for steps in pure):
        return off, on
    return pure[0], pure[1]


def _steps_of_block(block: int, records: Sequence[RequestRecord]) -> StepTimes:
    known = [r for r in records if r.sent_s is not None and r.first_s is not None]
    sent, begun = (np.sort([getattr(r, n) for r in known]) for n in ("sent_s", "first_s"))
    starts = np.sort([r.first_s for r in records if r.first_s is not None])
    ends = np.sort([r.last_s for r in records if r.last_s is not None])
    parts = []
    for record in records:
        times = merge_chunks(np.array(record.chunk_s))
        middles = (times[1:] + times[:-1]) / 2
        running = np.searchsorted(starts, middles, side="right") - np.searchsorted(ends, middles)
        waiting = np.searchsorted(sent, times[1:]) - np.searchsorted(begun, times[:-1], "right")
        blocks_N = np.full(middles.size, block, np.int64)
        parts.append((np.diff(times), running.astype(np.int64), blocks_N, waiting > 0))
    return StepTimes(*map(np.concatenate, zip(*parts, strict=True)))


def merge_chunks(times_N: Floats) -> Floats:
    """Arrivals of steps: the first of every group of chunks that arrived together."""
    gaps = np.diff(times_N)
    apart = gaps[gaps > TOGETHER_S]
    usual = float(np.median(apart)) if apart.size else 0.0
    begins_N = np.concatenate([[True], gaps > max(TOGETHER_S, _SHARE * usual)])
    merged_N: Floats = times_N[begins_N]
    return merged_N


BLOCKS_OF_A_RUN = 100_000
"""Blocks of several runs are numbered on in steps of this, see `of_runs`."""
FEWEST_STEPS = 20
RAREST_BATCH = 0.02
"""Steps per arm at a batch size before it gets a point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    batch: int
    rows: int
    """batch x (1 + k): rows of a verification."""
    num_steps: int
    cost: Interval
    """V + k c: a step that drafts over one of the baseline."""
    break_even: Interval
    """r*: draft acceptance rate at which speculation neither gains nor loses."""
    speedup: Interval
    """At the measured rate, steps that draft nothing included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    k: float
    """Mean drafts of a step that drafts."""
    draft_share: float
    """Share of the candidate's steps that draft."""
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


def of_runs(runs: Sequence[Sequence[RequestRecord]]) -> list[RequestRecord]:
    """One arm's records of several A/Bs, at several loads, with blocks that do not collide."""
    return [
        replace(record, block=record.block + number * BLOCKS_OF_A_RUN)
        for number, records in enumerate(runs)
        for record in records
    ]


def fit_arms(base: Sequence[RequestRecord], other: Sequence[RequestRecord]) -> Fit:
    """The fit of a plain baseline's and a speculating candidate's whole answers. Raises
    ConfigError: there are no step times, or the candidate's acceptance is not known."""
    off, on = without_prompts(step_times(base), step_times(other))
    if off.seconds_N.size == 0 or on.seconds_N.size == 0:
        allowed = "an A/B whose arms both gave streamed answers; see its errors, and measure again"
        raise ConfigError("RUN", "no chunk times", allowed)
    counts = counts_of_records(other)
    if counts is None:
        found = [r.acceptance for r in other if r.acceptance is not None]
        if found and not any(a.num_drafted for a in found):
            allowed = "a candidate that drafts something: none of its steps did, so nothing breaks "
            raise ConfigError("RUN", NOTHING_DRAFTED, f"{allowed}even")
        allowed = "a candidate whose answers tell about its drafts, as with "
        allowed += "--per-request-spec-decode-metrics detailed; or measure with --set candidate.k=K"
        raise ConfigError("RUN", "no acceptance", allowed)
    common = np.intersect1d(np.unique(off.batch_N), np.unique(on.batch_N))
    points = [_point(int(b), off, on, counts) for b in common]
    tokens = [r.output_tokens for r in base if r.output_tokens]
    lines = _Lines(off, on, counts, float(np.mean(tokens)) if tokens else math.nan)
    notes = []
    if lines.one_batch:
        notes.append("one batch size only: no crossover; measure at another load too, such as "
                     "--load closed:8, and give both: foretoken lab decide A B --fit")  # fmt: skip
    if lines.verify_cost.estimate < 1 or lines.draft_cost.estimate < 0:
        notes.append("V below 1 or c below 0: plain steps do not get longer with their batch here, "
                     "as where they wait for prompts; measure at two loads")  # fmt: skip
    if np.unique(off.blocks_N).size < FEWEST_BLOCKS:
        notes.append(f"fewer than {FEWEST_BLOCKS} blocks: no intervals")
    return Fit(
        k=counts.k,
        draft_share=counts.draft_share,
        acceptance_rate=counts.acceptance_rate,
        points=tuple(p for p in points if p is not None),
        draft_cost=lines.draft_cost,
        verify_cost=lines.verify_cost,
        crossover_batch=lines.crossover_batch,
        crossover_qps=lines.crossover_qps,
        notes=tuple(notes),
    )


def _point(batch: int, off: StepTimes, on: StepTimes, counts: StepCounts) -> FitPoint | None:
    own = [arm.only(arm.batch_N == batch) for arm in (off, on)]
    for at, arm in zip(own, (off, on), strict=True):
        # Fewer were only passed through, as when a block ends.
        if at.seconds_N.size < max(FEWEST_STEPS, RAREST_BATCH * arm.seconds_N.size):
            return None
    bottom, top = (Sample(at.seconds_N, at.blocks_N) for at in own)
    mean = paired_ratio(top, bottom, weighted_mean)
    gain, share = counts.tokens_per_step, counts.draft_share
    speedup = unknown(gain / mean.estimate)
    if mean.known:
        speedup = Interval(gain / mean.estimate, gain / mean.high, gain / mean.low)
    return FitPoint(
        batch=batch,
        rows=round(batch * (1 + counts.k)),
        num_steps=min(at.seconds_N.size for at in own),
        cost=Interval(*((end - 1) / share + 1 for end in (mean.estimate, mean.low, mean.high))),
        break_even=break_even(counts, speedup),
        speedup=speedup,
    )


class _Lines:
    """Both arms' step times as lines in the batch, whole and with each block left out."""

    def __init__(self, off: StepTimes, on: StepTimes, counts: StepCounts, tokens: float) -> None:
        blocks = np.intersect1d(off.blocks_N, on.blocks_N)
        size = max(int(blocks.size), 1)
        self._strata_C = blocks // BLOCKS_OF_A_RUN
        self._dof = int(blocks.size - np.unique(self._strata_C).size)
        weights_RC = np.vstack([np.ones((1, size)), 1.0 - np.eye(size)])
        with np.errstate(divide="ignore", invalid="ignore"):
            arms = [_fit_lines(_cells(steps, blocks), weights_RC) for steps in (off, on)]
        self._lines_R4 = np.hstack(arms)
        self.one_batch = bool(np.isnan(self._lines_R4[0]).any())
        self._covariance = jackknife_covariance(self._lines_R4[1:], self._strata_C)
        gain, k, share = counts.tokens_per_step, counts.k, counts.draft_share
        plain = (1.0, 1.0, 0.0, 0.0)
        self.verify_cost = self._quotient((1.0, 1.0 + k, 0.0, 0.0), plain)
        # on(1) = (1 - share) off(1) + share (off(1 + k) + k c off(1))
        drafting = tuple(x / (share * k) for x in (-1.0, -1.0 - share * k, 1.0, 1.0))
        self.draft_cost = self._quotient(drafting, plain)
        # on(b) = gain * off(b) at the crossover; below it speculation pays.
        self._forms = ((gain, 0.0, -1.0, 0.0), (0.0, -gain, 0.0, 1.0))
        self.crossover_batch = self._crossover()
        self.crossover_qps = self._rate_at_crossover(tokens)

    def _quotient(self, top: Sequence[float], bottom: Sequence[float]) -> Interval:
        point = _over(self._lines_R4[0], top, bottom)
        if self._dof < FEWEST_BLOCKS - 1 or not np.isfinite(self._covariance).all():
            return unknown(point)
        return quotient(self._lines_R4[0], (top, bottom), self._covariance, self._dof)

    def _crossover(self) -> Interval:
        """From 0, where speculation never pays, to infinity, where it always does."""
        top, bottom = (float(np.dot(form, self._lines_R4[0])) for form in self._forms)
        found = self._quotient(*self._forms)
        if math.isnan(top):
            return found
        if top <= 0:
            high = max(0.0, found.high) if bottom > 0 else found.high
            return replace(found, estimate=0.0, low=0.0 if found.known else found.low, high=high)
        if bottom <= 0:
            low = found.low if 0 < found.low < math.inf else found.high
            low = low if 0 < low < math.inf else -math.inf
            return replace(found, estimate=math.inf, low=low, high=math.inf)
        return replace(found, low=max(0.0, found.low) if found.low > -math.inf else found.low)

    def _rate_at_crossover(self, tokens: float) -> Interval:
        """Requests per second of the baseline at the crossover; its line's scale counts too."""
        batch = self.crossover_batch

        def rate(line: Floats, at: float) -> float:
            return at / ((line[0] + line[1] * at) * tokens) if math.isfinite(at) else math.inf

        point = rate(self._lines_R4[0], batch.estimate)
        with np.errstate(divide="ignore", invalid="ignore"):
            found = [rate(row, _over(row, *self._forms)) for row in self._lines_R4[1:]]
            logs_C1 = np.log(np.array(found))[:, None]
        if not (batch.known and 0 < point < math.inf and np.isfinite(logs_C1).all()):
            return unknown(point)
        error = math.sqrt(float(jackknife_covariance(logs_C1, self._strata_C)[0, 0]))
        half = student_quantile(1 - (1 - LEVEL) / 2, self._dof) * error
        return Interval(point, point * math.exp(-half), point * math.exp(half))


def _over(line: Floats, top: Sequence[float], bottom: Sequence[float]) -> float:
    under = float(np.dot(bottom, line))
    return float(np.dot(top, line)) / under if under else math.nan


def _cells(steps: StepTimes, blocks: Ints) -> Floats:
    """Mean step time of each (block, batch): rows of block index, batch, seconds, weight."""
    rows = []
    for index, block in enumerate(blocks):
        own = steps.blocks_N == block
        for batch in np.unique(steps.batch_N[own]):
            times = steps.seconds_N[own & (steps.batch_N == batch)]
            if times.size >= 5:
                rows.append((index, float(batch), float(times.mean()), float(times.size)))
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
