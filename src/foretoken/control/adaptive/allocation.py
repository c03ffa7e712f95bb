"""Which sequences draft how far in a step: most expected tokens per second of the whole batch.

Pure arithmetic on arrays: the same options give the same answer. A slot is one draft of one
sequence; it is worth the chance that it and all before it are accepted, its survival. For a given
depth of the batch the passes cost what they cost, so the best set of a given size is the one with
the highest survival, which is a prefix of every sequence's drafts (ties go to the earlier draft).
Scanning sizes and depths is exact for any cost of rows, with no convexity needed. Knows neither
requests nor clocks.

`foretoken.kernels.allocating` has the same search in C. It is held against this one to the last
bit, so sums whose order NumPy would choose (`sum`) are made from the first to the last (`cumsum`).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.learned.regression import Floats

Counts = NDArray[np.int64]
MARGIN = 0.02
"""What drafting has to bring beyond not drafting, as a share."""
MOST_DRAFTERS = 3
"""Drafters with passes of which every subset is tried."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOption:
    """What one drafter could do in this step. N sequences, K drafts at most."""

    name: str
    survival_NK: Floats
    """Chance that draft j of sequence i and all before it are accepted; falls with j; 0 where the
    sequence may not have that draft."""
    depth_s: Floats
    """Seconds of the passes of a draft of depth 0, 1, ..., K, sequences aside."""
    slot_s: float
    """Seconds that each slot adds to them."""
    start_s: Floats
    """Seconds a step that each sequence adds besides, however many slots it has, [N]: `each_s`, and
    its share in catching up where something is missing."""
    each_s: float = 0.0
    """The part of `start_s` that is the same for every sequence."""
    late_N: NDArray[np.bool_] | None = None
    """Sequences that will end before what would have to be read of them comes back; None: none."""

    def without(self, places: NDArray[np.bool_] | list[int]) -> "DraftOption":
        """The same without drafts for these sequences."""
        survival_NK = self.survival_NK.copy()
        survival_NK[places] = 0.0
        return replace(self, survival_NK=survival_NK, late_N=None)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What a step costs and what it may not cost."""

    rows_s: Floats
    """Seconds of the target's step with 0, 1, ... more rows than its sequences have."""
    plain_s: float
    """Seconds of the same step where nothing is drafted, by the steps that were seen."""
    bound_s: Floats
    """For each sequence the time that a step may take if it gets one token, [N]."""
    token_s: Floats
    """What one more expected token of a sequence adds to that, [N]."""
    margin: float = MARGIN
    """Drafting has to bring this much more tokens per second than not drafting."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """How far each sequence drafts, with whom, and what is expected of it."""

    lengths_N: Counts
    drafter_N: Counts
    """Index of the option that drafts for each sequence; -1: none."""
    seconds: float
    """Of the whole step."""
    tokens: float
    """Expected of all sequences."""
    unguarded: float
    """Tokens per second that the best plan would have without bounds."""
    depth: int = 0
    """Passes of the drafters."""

    @property
    def rate(self) -> float:
        """Expected tokens per second: the price of a second."""
        return self.tokens / self.seconds


def accepted_drafts(found: Allocation, options: Seq[DraftOption]) -> Floats:
    """How many drafts of each sequence are expected to be accepted, [N], by what `options` say of
    those that `found` chose."""
    accepted_N = np.zeros(len(found.lengths_N))
    for index in sorted(set(found.drafter_N.tolist()) - {-1}):
        survival_NK = options[index].survival_NK
        taken_NK = np.arange(survival_NK.shape[1]) < found.lengths_N[:, None]
        own_N = found.drafter_N == index
        accepted_N[own_N] = (survival_NK * taken_NK).sum(axis=1)[own_N]
    return accepted_N


Search: TypeAlias = Callable[[StepOptions, Seq[DraftOption]], Allocation]
"""`allocate`, or what finds the same faster."""


def allocate(step: StepOptions, options: Seq[DraftOption]) -> Allocation:
    """The plan with most expected tokens per second among those that keep all bounds.

    Every subset of the drafters is tried, for each every depth, for each every number of slots.
    Drafting nothing is always allowed and wins ties.
    """
    count = len(step.bound_s)
    best = nothing = _nothing(step, count)
    least = best.rate * (1.0 + step.margin)
    unguarded = best.rate
    worthy = []
    for index in range(len(options)):
        if not _may_pay(step, options[index], least):
            continue
        found = _with(step, options, (index,), best.rate)
        unguarded = max(unguarded, found.unguarded)
        if found.rate > nothing.rate:
            worthy.append(index)
        if found.rate > max(best.rate, least):
            best = found
    # One sequence has one drafter, and one that does not pay alone does not pay beside another.
    for size in range(2, min(len(worthy), count, MOST_DRAFTERS) + 1):
        for chosen in combinations(worthy[:MOST_DRAFTERS], size):
            found = _with(step, options, chosen, best.rate)
            if found.rate > max(best.rate, least):
                best = found
    return replace(best, unguarded=max(unguarded, best.unguarded))


def _nothing(step: StepOptions, count: int) -> Allocation:
    none = np.zeros(count, dtype=np.int64)
    rate = count / step.plain_s
    return Allocation(
        lengths_N=none, drafter_N=none - 1, seconds=step.plain_s, tokens=float(count),
        unguarded=rate,
    )  # fmt: skip


def _may_pay(step: StepOptions, option: DraftOption, rate: float) -> bool:
    """Whether drafts of this drafter could bring more tokens per second than `rate`, if the best of
    them could be had in a single pass and without catching up: one sort for all depths."""
    taken = -np.sort(-option.survival_NK, axis=None)
    size = int(np.searchsorted(-taken, 0.0))
    if not size:
        return False
    seconds = step.rows_s[1 : size + 1] + option.slot_s * np.arange(1, size + 1)
    seconds += option.depth_s[1]
    rates = (len(step.bound_s) + np.cumsum(taken[:size])) / seconds
    return bool(rates.max() > rate)


def _with(
    step: StepOptions, options: Seq[DraftOption], chosen: tuple[int, ...], rate: float
) -> Allocation:
    """The best plan in which these drafters, and no others, run passes; nothing if none may."""
    if len(step.bound_s) == 1 and len(chosen) == 1:
        return _alone(step, options[chosen[0]], chosen[0])
    owner_N = _owners(step, options, chosen, rate)
    survival_NK, start_N = _of_owners(options, chosen, owner_N)
    slot_s = sum(options[i].slot_s for i in chosen) / len(chosen)
    count, most = survival_NK.shape
    best: tuple[float, int, Counts, float, float] | None = None
    unguarded = 0.0
    passes_K = np.sum([options[i].depth_s[: most + 1] for i in chosen], axis=0)
    deepest = _worth_looking_at(step, survival_NK, np.diff(passes_K))
    for depth in range(1, deepest + 1):
        # Depth is the slower index, so that equal chances are taken from the first draft on.
        flat = survival_NK[:, :depth].T.ravel()
        order = np.argsort(-flat, kind="stable")
        taken = flat[order]
        size = int(np.searchsorted(-taken, 0.0))
        if size == 0:
            break
        order, taken = order[:size], taken[:size]
        sequences = order % count
        starts = np.where(order < count, start_N[sequences], 0.0)
        seconds = step.rows_s[1 : size + 1] + passes_K[depth] + slot_s * np.arange(1, size + 1)
        seconds += np.cumsum(starts)
        tokens = count + np.cumsum(taken)
        rates = tokens / seconds
        unguarded = max(unguarded, float(rates.max()))
        at = int(rates.argmax())
        if best is not None and rates[at] <= best[0]:
            continue
        # The bounds of all sizes are only worked out where the best size breaks one.
        if not _keeps_bounds(step, sequences[: at + 1], taken[: at + 1], float(seconds[at])):
            allowed = _bounds(step, sequences, taken) >= seconds
            if not allowed.any():
                continue
            at = int(np.where(allowed, rates, 0.0).argmax())
        if best is None or rates[at] > best[0]:
            taking = sequences[: at + 1]
            best = (float(rates[at]), depth, taking, float(seconds[at]), float(tokens[at]))
    if best is None:
        return replace(_nothing(step, count), unguarded=unguarded)
    _, depth, sequences, took_s, brought = best
    lengths_N = np.bincount(sequences, minlength=count).astype(np.int64)
    drafter_N = np.where(lengths_N > 0, np.asarray(chosen, dtype=np.int64)[owner_N], -1)
    return Allocation(
        lengths_N=lengths_N, drafter_N=drafter_N, seconds=took_s, tokens=brought,
        unguarded=unguarded, depth=depth,
    )  # fmt: skip


def _of_owners(
    options: Seq[DraftOption], chosen: tuple[int, ...], owner_N: Counts
) -> tuple[Floats, Floats]:
    """Of each sequence the chances [N, K] and the share in catching up [N] with its drafter."""
    survival_NK, start_N = options[chosen[0]].survival_NK, options[chosen[0]].start_s
    for place, index in enumerate(chosen[1:], 1):
        owned_N = owner_N == place
        survival_NK = np.where(owned_N[:, None], options[index].survival_NK, survival_NK)
        start_N = np.where(owned_N, options[index].start_s, start_N)
    return survival_NK, start_N


def _worth_looking_at(step: StepOptions, survival_NK: Floats, pass_s: Floats) -> int:
    """The depth beyond which no draft of a chain can be worth the passes it needs.

    From there on all sequences together are expected to get fewer tokens of a pass than plain
    steps bring in its time, and each sequence less than that pass takes of its own. Whatever plan
    goes deeper, one that does not is at least as fast and breaks no bound that it keeps.
    """
    count = len(step.bound_s)
    least_K = np.minimum.accumulate(pass_s[::-1])[::-1]
    brings = (np.cumsum(survival_NK, axis=0)[-1] <= least_K * (count / step.plain_s)) & (
        (survival_NK * step.token_s[:, None]).max(axis=0) <= least_K
    )
    deeper = np.flatnonzero(~brings)
    return int(deeper[-1]) + 1 if len(deeper) else 1


def _alone(step: StepOptions, option: DraftOption, index: int) -> Allocation:
    """`_with` for one sequence and one drafter, where a set of slots is a depth."""
    # Near the end of an output the step has room for fewer rows than the drafter has drafts.
    most = min(option.survival_NK.shape[1], len(step.rows_s) - 1)
    survival_K = option.survival_NK[0, :most]
    accepted = np.cumsum(survival_K)
    seconds = step.rows_s[1 : most + 1] + option.depth_s[1 : most + 1] + option.start_s[0]
    seconds = seconds + option.slot_s * np.arange(1, most + 1)
    rates = np.where(survival_K > 0.0, (1.0 + accepted) / seconds, 0.0)
    allowed = step.bound_s[0] + step.token_s[0] * accepted >= seconds
    at = int(np.argmax(np.where(allowed, rates, 0.0)))
    if not allowed[at] or rates[at] == 0.0:
        return replace(_nothing(step, 1), unguarded=float(rates.max()))
    return Allocation(
        lengths_N=np.array([at + 1]), drafter_N=np.array([index]), seconds=float(seconds[at]),
        tokens=1.0 + float(accepted[at]), unguarded=float(rates.max()), depth=at + 1,
    )  # fmt: skip


def _owners(
    step: StepOptions, options: Seq[DraftOption], chosen: tuple[int, ...], rate: float
) -> Counts:
    """For each sequence the place in `chosen` of the drafter with most to give at this rate."""
    count = len(step.bound_s)
    if len(chosen) == 1:
        return np.zeros(count, dtype=np.int64)
    rows = len(step.rows_s) - 1
    row_s = (step.rows_s[-1] - step.rows_s[0]) / max(rows, 1)
    surplus = []
    for index in chosen:
        option = options[index]
        gains_NK = np.maximum(option.survival_NK - rate * (row_s + option.slot_s), 0.0)
        surplus.append(np.cumsum(gains_NK, axis=1)[:, -1] - rate * option.start_s)
    owners: Counts = np.argmax(np.stack(surplus), axis=0)
    return owners


def _keeps_bounds(step: StepOptions, sequences: Counts, taken: Floats, seconds: float) -> bool:
    """Whether a step of so many seconds is allowed by all sequences that have these slots."""
    accepted_N = np.bincount(sequences, weights=taken, minlength=len(step.bound_s))
    return bool((step.bound_s + step.token_s * accepted_N >= seconds).all())


def _bounds(step: StepOptions, sequences: Counts, taken: Floats) -> Floats:
    """For every number of slots the least time that any sequence allows."""
    size, count = len(taken), len(step.bound_s)
    accepted_MN = np.zeros((size, count))
    accepted_MN[np.arange(size), sequences] = taken
    np.cumsum(accepted_MN, axis=0, out=accepted_MN)
    least: Floats = (step.bound_s + step.token_s * accepted_MN).min(axis=1)
    return least
