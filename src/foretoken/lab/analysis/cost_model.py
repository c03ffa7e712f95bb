"""One cost model out of all runs of a pair of servers: what a step costs at every load and length.

A step of b requests of which each brings k drafts takes base + b request + b (1 + k) row, and
once + k draft more for its drafts: the form of DSpark's planners (arXiv 2607.05147), with drafting
apart, which trimming what is verified does not save. Mean step times by batch of the baseline and
of every length tell the five costs, none below 0, by least squares of relative errors; where only
some steps draft, their share counts. Both arms of a block are of one time, so a machine that was
slower then is told by plain decoding. What a length yields is its own steps' tokens, as counted:
nothing is said of lengths that were not measured.

Step times are those between arrivals. Servers send a step's tokens in one chunk or in several at
once; chunks that arrive together are one step, and gaps between a request's steps are its times. A
step beside which a prompt was read is longer for that, and is told apart.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.errors import ConfigError
from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, StepCounts, counts_of_records
from foretoken.lab.launch.engines import MOST_RUNNING, DraftingSetup, Ranges, given
from foretoken.lab.launch.read import read_source
from foretoken.lab.records.results import AbSummary, RequestRecord
from foretoken.lab.stats.intervals import Floats
from foretoken.lab.stats.ratios import Ints
from foretoken.lab.verdict import FASTER

ALIKE = 0.01
"""Of two lengths whose gains differ by no more, the shorter is taken."""
MISFIT = 0.1
"""Relative error at a measured batch from which the costs are marked."""
TOGETHER_S = 0.0004
"""Chunks nearer than this, or than a share of the usual gap, are one step."""
_SHARE = 0.15
FEWEST_PURE = 200
"""Steps without prompts beside them, per arm, before the others can be left out."""
FEWEST_STEPS = 20
RAREST_BATCH = 0.02
"""Steps per arm at a batch size before it counts."""
BLOCKS_OF_A_RUN = 100_000
"""Blocks of several runs are numbered on in steps of this."""
Bools = NDArray[np.bool_]
Measured = tuple[AbSummary, Sequence[RequestRecord], Sequence[RequestRecord]]
"""An A/B, and the whole answers of its baseline and of its candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthSeen:
    k: int
    """As the server was told."""
    drafted: float
    """Mean drafts of a step that drafts."""
    share: float
    """Of steps that draft."""
    tokens_per_step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """Seconds of a step's parts, and what the lengths that were measured yield."""

    base_s: float
    request_s: float
    row_s: float
    once_s: float
    draft_s: float
    lengths: tuple[LengthSeen, ...]
    batches: tuple[int, ...]
    """Requests that decoded at once in steps enough to tell."""
    misfit: float
    """Largest relative error at one of them."""
    context_tokens: int
    """Mean tokens of a request half way through its answer; 0: the server does not say."""

    @property
    def longest(self) -> int:
        return self.lengths[-1].k

    def step_s(self, batch: float, k: float = 0, share: float = 1.0) -> float:
        """A mean step of `batch` requests that brings `k` drafts each in a `share` of them."""
        costs = (self.base_s, self.request_s, self.row_s, self.once_s, self.draft_s)
        return float(np.dot(_parts(batch, k, share if k else 0.0), costs))

    def gain(self, batch: float, seen: LengthSeen) -> float:
        """Speed-up over plain decoding."""
        step_s = self.step_s(batch, seen.drafted, seen.share)
        return seen.tokens_per_step * self.step_s(batch) / step_s

    def break_even(self, batch: float, seen: LengthSeen) -> float:
        """Accepted over drafted tokens at which the length gains nothing; above 1: none pays."""
        step_s = self.step_s(batch, seen.drafted, seen.share)
        return (step_s / self.step_s(batch) - 1) / (seen.share * seen.drafted)

    def best(self, batch: float, most: int = MOST_RUNNING) -> int:
        """The length to draft at a load, none above `most`; 0: none pays."""
        gains = {one.k: self.gain(batch, one) for one in self.lengths if one.k <= most}
        top = max(gains.values(), default=0.0)
        return min(k for k, g in gains.items() if g >= top * (1 - ALIKE)) if top > FASTER else 0

    def paying(self, batch: float) -> tuple[int, ...]:
        """Lengths up to the best one that pay at a load."""
        own = self.best(batch)
        pay = (one.k for one in self.lengths if one.k <= own and self.gain(batch, one) > FASTER)
        return tuple(pay)

    @property
    def schedule(self) -> Ranges:
        """(first, last, length) from 1 on, none longer than at a lower load. The last goes on: of
        more requests than were measured nothing is known."""
        found: list[tuple[int, int, int]] = []
        k = self.longest
        for batch in range(1, self.batches[-1] + 1):
            k = self.best(batch, k) if k else 0
            first = found.pop()[0] if found and found[-1][2] == k else batch
            found.append((first, batch, k))
        found[-1] = (found[-1][0], MOST_RUNNING, found[-1][2])
        return tuple(found)

    @property
    def one_length(self) -> int:
        """The length with the best gain over all measured loads alike; 0: none pays."""
        means = {one.k: self._mean_log(one) for one in self.lengths}
        top = max(means.values())
        return min(k for k, v in means.items() if v >= top - ALIKE) if top > math.log(FASTER) else 0

    def _mean_log(self, seen: LengthSeen) -> float:
        return float(np.mean([math.log(self.gain(batch, seen)) for batch in self.batches]))

    def least_chance(self, k: int) -> float:
        """The chance of a draft token below which drafting and verifying one more takes longer than
        it saves, at a length and over all measured loads alike."""
        seen = next(one for one in self.lengths if one.k == k)
        found = [
            (self.draft_s + self.row_s * batch)
            * seen.tokens_per_step
            / self.step_s(batch, seen.drafted, seen.share)
            for batch in self.batches
        ]
        return min(float(np.mean(found)), 1.0)

    @property
    def notes(self) -> tuple[str, ...]:
        said = [f"more than {self.batches[-1]} requests at once were not measured"]
        if crossover := next((first for first, _, k in self.schedule if not k), None):
            said.append(f"from {crossover} requests at once on no length pays")
        if self.misfit > MISFIT:
            why = "the machine was not quiet, or steps are no straight line over the load"
            said.append(f"measured steps differ from these costs by up to {self.misfit:.0%}: {why}")
        return tuple(said)


def _parts(batch: float, k: float, share: float) -> tuple[float, ...]:
    return 1.0, batch, batch * (1 + share * k), share, share * k


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


class _Cell(NamedTuple):
    parts: tuple[float, ...]
    seconds: float
    num_steps: int
    batch: int


def learn(by_length: Mapping[int, Sequence[RequestRecord]]) -> MeasuredCosts:
    """The costs out of whole answers by the length that their server was told; 0: no speculation.
    Raises ConfigError: there are no step times or no counted drafts, no plain decoding, or one
    load only."""
    if not by_length.get(0) or len(by_length) < 2:
        given = f"lengths {sorted(by_length)}"
        raise ConfigError("RUNS", given, "runs without speculation, and with one length or more")
    steps = {k: step_times(records) for k, records in by_length.items()}
    pure = {k: own.only(~own.mixed_N) for k, own in steps.items()}
    if all(own.seconds_N.size >= FEWEST_PURE for own in pure.values()):
        steps = pure
    steps = _at_one_pace(steps)
    cells: list[_Cell] = []
    lengths = []
    for k, records in sorted(by_length.items()):
        counts = counts_of_records(records) if k else None
        if k and counts is None:
            allowed = "a candidate whose answers count their drafts, as with "
            allowed += "--per-request-spec-decode-metrics detailed"
            raise ConfigError("RUNS", f"length {k}: {NOTHING_DRAFTED}", allowed)
        if counts is not None:
            lengths.append(LengthSeen(k=k, drafted=counts.k, share=counts.draft_share,
                                      tokens_per_step=counts.tokens_per_step))  # fmt: skip
        cells += _cells(steps[k], counts)
    batches = tuple(sorted({cell.batch for cell in cells}))
    if len(batches) < 2:
        allowed = "runs at two loads or more: foretoken lab ab --grid concurrency=1,8"
        raise ConfigError("RUNS", f"steps of {list(batches)} requests at once", allowed)
    costs, misfit = _least_squares(cells)
    names = ("base_s", "request_s", "row_s", "once_s", "draft_s")
    return MeasuredCosts(**dict(zip(names, costs, strict=True)), lengths=tuple(lengths),
                     batches=batches, misfit=misfit,
                     context_tokens=_context_of(by_length[0]))  # fmt: skip


def _at_one_pace(steps: Mapping[int, StepTimes]) -> dict[int, StepTimes]:
    """Step times as on a machine that is always as fast: by how much plain decoding was slower in a
    block than elsewhere with as many requests, everything in that block was."""
    plain = steps[0]
    usual_N = np.ones(plain.seconds_N.size)
    for batch in np.unique(plain.batch_N):
        usual_N[plain.batch_N == batch] = plain.seconds_N[plain.batch_N == batch].mean()
    ratios_N = plain.seconds_N / usual_N
    paces = {b: ratios_N[plain.blocks_N == b].mean() for b in np.unique(plain.blocks_N)}
    return {
        k: own._replace(seconds_N=own.seconds_N / [paces.get(b, 1.0) for b in own.blocks_N])
        for k, own in steps.items()
    }


def _cells(steps: StepTimes, counts: StepCounts | None) -> Iterable[_Cell]:
    k, share = (counts.k, counts.draft_share) if counts else (0.0, 0.0)
    for batch in np.unique(steps.batch_N):
        own = steps.seconds_N[steps.batch_N == batch]
        # Fewer were only passed through, as when a block ends.
        if batch and own.size >= max(FEWEST_STEPS, RAREST_BATCH * steps.seconds_N.size):
            yield _Cell(_parts(float(batch), k, share), float(own.mean()), own.size, int(batch))


def _least_squares(cells: Sequence[_Cell]) -> tuple[list[float], float]:
    """The costs, none below 0, and the largest relative error of a cell."""
    parts_M5 = np.array([cell.parts for cell in cells])
    seconds_M: Floats = np.array([cell.seconds for cell in cells])
    weights_M = np.sqrt([cell.num_steps for cell in cells]) / seconds_M
    kept = list(range(parts_M5.shape[1]))
    if len({cell.parts[4] / cell.parts[3] for cell in cells if cell.parts[3]}) < 2:
        kept.remove(3)  # with one length, what drafting costs once is not told apart
    while True:
        scaled_M = (parts_M5[:, kept].T * weights_M).T
        costs, *_ = np.linalg.lstsq(scaled_M, weights_M * seconds_M, rcond=None)
        worst = int(np.argmin(costs))
        if costs[worst] >= 0:
            break
        kept.pop(worst)
    found = np.zeros(parts_M5.shape[1])
    found[kept] = costs
    misfit = float(np.abs(parts_M5 @ found / seconds_M - 1).max())
    return found.tolist(), misfit


def _context_of(records: Sequence[RequestRecord]) -> int:
    known = [r.prompt_tokens + (r.output_tokens or 0) / 2 for r in records if r.prompt_tokens]
    return round(float(np.mean(known))) if known else 0


def by_length(runs: Sequence[Measured]) -> dict[int, list[RequestRecord]]:
    """Whole answers of A/Bs by the length of their candidate, those of all baselines under 0.
    Raises ConfigError: the baselines are not one server, or candidates have several drafters."""
    drafting = (drafting_of(summary) for summary, *_ in runs)
    drafters = {one.name for one in drafting if one is not None}
    if len(drafters) > 1:
        raise ConfigError("RUNS", sorted(drafters), "runs of one drafter")
    baselines = {server_of(summary, "baseline") for summary, *_ in runs}
    if len(baselines) > 1:
        raise ConfigError("RUNS", sorted(baselines), "runs against one and the same baseline")
    found: dict[int, list[RequestRecord]] = {0: []}
    for number, (summary, base, other) in enumerate(runs):
        for k, records in ((0, base), (length_of(summary, other), other)):
            shift = number * BLOCKS_OF_A_RUN  # both arms alike: a block is one time
            moved = (replace(one, block=one.block + shift) for one in records)
            found.setdefault(k, []).extend(moved)
    return found


def server_of(summary: AbSummary, arm: str) -> str:
    """The command of the baseline or of the candidate, or else its URL."""
    told = summary.config.get(arm) or {}
    return str(told.get("command") or told.get("url") or "")


def drafting_of(summary: AbSummary) -> DraftingSetup | None:
    """What the candidate's command drafts with, as far as it can be read."""
    launch = next(iter(read_source(server_of(summary, "candidate")).launches), None)
    return given(launch) if launch is not None else None


def length_of(summary: AbSummary, records: Sequence[RequestRecord]) -> int:
    """The length that a candidate was told; else the one that it drafted."""
    drafting = drafting_of(summary)
    counts = counts_of_records(records)
    drafted = math.ceil(counts.k - 0.5) if counts else 1
    return (drafting.num_drafts if drafting else 0) or max(drafted, 1)
