"""Simulated runs beside each other: ratios of speeds, above 1 where the second is faster."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from benchmarks.simulate.serving import ServedRequest, SimulatedRun


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRatios:
    """How many times as fast one run was as another; NaN where no request ended."""

    throughput: float
    tpot_p50: float
    tpot_p99: float
    ttft_p50: float
    ttft_p99: float


def compare(
    run: SimulatedRun, base: SimulatedRun, kind: str | None = None, *, skip: int = 0
) -> SpeedRatios:
    """The run against the base; of one class of requests, or of all.

    The times of the first `skip` requests do not count: where clients begin all at once, they tell
    of that alone.
    """
    ours, theirs = _of(run, kind, skip), _of(base, kind, skip)

    def ratio(name: str, percent: float) -> float:
        if not ours or not theirs:
            return math.nan
        before = np.percentile([getattr(one, name) for one in theirs], percent)
        return float(before / np.percentile([getattr(one, name) for one in ours], percent))

    return SpeedRatios(
        throughput=run.tokens_per_s / base.tokens_per_s,
        tpot_p50=ratio("tpot", 50),
        tpot_p99=ratio("tpot", 99),
        ttft_p50=ratio("ttft", 50),
        ttft_p99=ratio("ttft", 99),
    )


def ratio_after(run: SimulatedRun, base: SimulatedRun, tokens: int) -> float:
    """Throughput against the base's from so many output tokens on, when the start is paid."""
    return _rate_after(run, tokens) / _rate_after(base, tokens)


def window_ratios(run: SimulatedRun, base: SimulatedRun, tokens: int) -> list[float]:
    """The same for each stretch of so many output tokens of both."""
    ours, theirs = _times(run, tokens), _times(base, tokens)
    return [before / now for now, before in zip(ours, theirs, strict=False)]


def _of(run: SimulatedRun, kind: str | None, skip: int) -> Sequence[ServedRequest]:
    return [one for one in run.requests if kind in (None, one.kind) and one.number >= skip]


def _times(run: SimulatedRun, tokens: int) -> list[float]:
    """Seconds that each stretch of so many tokens took."""
    ends, done = [0.0], 0
    for step in run.steps:
        done += step.tokens
        while done >= tokens * len(ends):
            ends.append(step.at)
    return [after - before for before, after in zip(ends, ends[1:], strict=False)]


def _rate_after(run: SimulatedRun, tokens: int) -> float:
    done, began = 0, 0.0
    for step in run.steps:
        if done >= tokens:
            break
        done, began = done + step.tokens, step.at
    total = sum(step.tokens for step in run.steps)
    return (total - done) / (run.seconds - began)
