"""Step times out of arrivals: the gaps between a request's steps, and how many ran beside it.

Servers send a step's tokens in one chunk or in several at once; chunks that arrive together are one
step. Pure; knows records only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.lab.results import RequestRecord
from foretoken.lab.statistics import Floats
from foretoken.lab.statistics_ratio import Ints

TOGETHER_S = 0.0004
"""Chunks nearer than this, or than a share of the usual gap, are one step."""
_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One entry per step of any request of one arm."""

    seconds_N: Floats
    batch_N: Ints
    """Requests that were decoding in the middle of the step."""
    blocks_N: Ints

    def at(self, batch: int) -> "StepTimes":
        """The steps at one batch size."""
        keep_N = self.batch_N == batch
        return StepTimes(self.seconds_N[keep_N], self.batch_N[keep_N], self.blocks_N[keep_N])


def step_times(records: Sequence[RequestRecord]) -> StepTimes:
    """The steps of an arm's records; requests without chunk times have none."""
    blocks: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.ok and len(record.chunk_s) > 1:
            blocks[record.block].append(record)
    parts = [_steps_of_block(number, found) for number, found in sorted(blocks.items())]
    if not parts:
        return StepTimes(np.array([]), np.array([], np.int64), np.array([], np.int64))
    return StepTimes(
        np.concatenate([p.seconds_N for p in parts]),
        np.concatenate([p.batch_N for p in parts]),
        np.concatenate([p.blocks_N for p in parts]),
    )


def _steps_of_block(block: int, records: Sequence[RequestRecord]) -> StepTimes:
    starts = np.sort([r.first_s for r in records if r.first_s is not None])
    ends = np.sort([r.last_s for r in records if r.last_s is not None])
    seconds, batches = [], []
    for record in records:
        times = merge_chunks(np.array(record.chunk_s))
        middles = (times[1:] + times[:-1]) / 2
        running = np.searchsorted(starts, middles, side="right") - np.searchsorted(ends, middles)
        seconds.append(np.diff(times))
        batches.append(running)
    gaps_N = np.concatenate(seconds)
    return StepTimes(
        gaps_N,
        np.concatenate(batches).astype(np.int64),
        np.full(gaps_N.size, block, np.int64),
    )


def merge_chunks(times_N: Floats) -> Floats:
    """Arrivals of steps: the first of every group of chunks that arrived together."""
    gaps = np.diff(times_N)
    apart = gaps[gaps > TOGETHER_S]
    usual = float(np.median(apart)) if apart.size else 0.0
    begins_N = np.concatenate([[True], gaps > max(TOGETHER_S, _SHARE * usual)])
    merged_N: Floats = times_N[begins_N]
    return merged_N
