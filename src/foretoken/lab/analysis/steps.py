"""Step times out of arrivals: the gaps between a request's steps, and how many ran beside it.

Servers send a step's tokens in one chunk or in several at once; chunks that arrive together are one
step. A step beside which a prompt was read is longer for that, and is told apart. Pure; knows
records only.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import Floats
from foretoken.lab.stats.ratios import Ints

TOGETHER_S = 0.0004
"""Chunks nearer than this, or than a share of the usual gap, are one step."""
_SHARE = 0.15
FEWEST_PURE = 200
"""Steps without prompts beside them, per arm, before the others can be left out."""
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One entry per step of any request of one arm."""

    seconds_N: Floats
    batch_N: Ints
    """Requests that were decoding in the middle of the step."""
    blocks_N: Ints
    mixed_N: Bools
    """Whether another request waited for its first token meanwhile, as far as is known."""

    def only(self, keep_N: Bools) -> "StepTimes":
        """Some of the steps."""
        return StepTimes(
            self.seconds_N[keep_N], self.batch_N[keep_N], self.blocks_N[keep_N],
            self.mixed_N[keep_N],
        )  # fmt: skip

    def at(self, batch: int) -> "StepTimes":
        """The steps at one batch size."""
        return self.only(self.batch_N == batch)


def step_times(records: Sequence[RequestRecord]) -> StepTimes:
    """The steps of an arm's records; requests without chunk times have none."""
    blocks: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.ok and len(record.chunk_s) > 1:
            blocks[record.block].append(record)
    parts = [_steps_of_block(number, found) for number, found in sorted(blocks.items())]
    if not parts:
        none = np.array([], np.int64)
        return StepTimes(np.array([]), none, none, np.array([], np.bool_))
    return StepTimes(
        np.concatenate([p.seconds_N for p in parts]),
        np.concatenate([p.batch_N for p in parts]),
        np.concatenate([p.blocks_N for p in parts]),
        np.concatenate([p.mixed_N for p in parts]),
    )


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
    seconds, batches, mixed = [], [], []
    for record in records:
        times = merge_chunks(np.array(record.chunk_s))
        middles = (times[1:] + times[:-1]) / 2
        running = np.searchsorted(starts, middles, side="right") - np.searchsorted(ends, middles)
        seconds.append(np.diff(times))
        batches.append(running)
        waiting = np.searchsorted(sent, times[1:]) - np.searchsorted(begun, times[:-1], "right")
        mixed.append(waiting > 0)
    gaps_N = np.concatenate(seconds)
    return StepTimes(
        gaps_N,
        np.concatenate(batches).astype(np.int64),
        np.full(gaps_N.size, block, np.int64),
        np.concatenate(mixed),
    )


def merge_chunks(times_N: Floats) -> Floats:
    """Arrivals of steps: the first of every group of chunks that arrived together."""
    gaps = np.diff(times_N)
    apart = gaps[gaps > TOGETHER_S]
    usual = float(np.median(apart)) if apart.size else 0.0
    begins_N = np.concatenate([[True], gaps > max(TOGETHER_S, _SHARE * usual)])
    merged_N: Floats = times_N[begins_N]
    return merged_N
