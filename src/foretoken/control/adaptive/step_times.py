"""Times of the last few steps, gathered so that learning from them costs little.

Steps of one shape are learnt together by a mean that no single slow step moves.
"""

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, final

from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import DraftShape
from foretoken.control.learned.regression import NOISE, OUTLIER
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import DraftOutcome, DraftPlan, StepLoad
from foretoken.types import StepStats

_FAR = math.exp(OUTLIER * NOISE)
"""Times the median beyond which a step is an outlier, as for the regression that learns from it."""
_MUCH_READ = 64
"""Tokens of which reading takes longer than what else is slow in a first step with drafts."""


class SeenStep(NamedTuple):
    """A step that is over."""

    plan: DraftPlan
    outcomes: Seq[DraftOutcome]
    stats: StepStats
    deciding_s: float
    """What deciding took of it."""


class PastStep(NamedTuple):
    """A step by a plan that was made, not learnt from yet."""

    seen: SeenStep
    missing: Counter[str]
    """Tokens that each drafter read in it; 0 for one that had read all before."""
    is_usual: bool
    """Whether it is no change from plain steps to drafts or back."""


class DraftingKind(NamedTuple):
    """What a drafter did in a step, its context aside."""

    name: str
    sequences: int
    depth: int
    num_drafts: int
    fed_rows: int

    def shape(self, context: float) -> DraftShape:
        """The same for the model of time."""
        return DraftShape(
            sequences=self.sequences,
            passes=self.depth,
            rows=self.num_drafts,
            context=context,
            fed_rows=self.fed_rows,
        )


@final
class RecentTimes:
    """Seconds of steps by their shape."""

    __slots__ = ("_drafters", "_target", "count")

    def __init__(self) -> None:
        """No step yet."""
        self.count = 0
        self._target: dict[tuple[int, int, int, int], list[float]] = {}
        self._drafters: dict[DraftingKind, list[float]] = {}

    def add(
        self,
        load: StepLoad,
        stats: StepStats,
        missing: Mapping[str, int],
        deciding_s: float,
        *,
        is_usual: bool,
    ) -> None:
        """A step of this load took so long, `deciding_s` of it for its plan; drafters read what was
        `missing` in it. `is_usual`: it is no change from plain steps to drafts or back. What did
        not run just before is slow at first, and what is seldom done would seem dear for that."""
        drafted, decoding = stats.num_draft_tokens, load.num_decoding
        if not is_usual:
            if decoding == 1 and sum(missing.values()) >= _MUCH_READ:
                # Nearly all of that is reading, and who is alone is read in no other step.
                self._add_drafting(stats, missing)
            return
        self.count += 1
        # What was really computed of prompts may differ from what was foreseen.
        prompt = stats.num_tokens - drafted - decoding
        key = decoding, load.num_prefilling, prompt, drafted
        # What drafting takes beside the drafters is part of checking drafts.
        drafters_s = sum(one.seconds for one in stats.drafters)
        seconds = stats.busy_s - drafters_s - deciding_s
        if key in self._target:
            self._target[key].append(seconds)
        else:
            self._target[key] = [seconds]
        self._add_drafting(stats, missing)

    def teach(
        self,
        target: TargetStepTimeModel,
        drafters: Mapping[str, DrafterState],
        context: float,
        *,
        apart: bool,
    ) -> None:
        """Steps of sequences of so many tokens are learnt from, and forgotten: each one `apart`, or
        the middle of those of a shape."""
        for (decoding, prefilling, prompt, drafted), seconds in self._target.items():
            shape = StepShape(
                rows=decoding + prompt + drafted,
                sequences=decoding + prefilling,
                context=context,
                prompt_rows=prompt,
            )
            for one, times in _counted(seconds, apart=apart):
                target.observe(shape, one, times=times)
        for drafting, seconds in self._drafters.items():
            if drafting.name not in drafters or not drafting.sequences:
                continue
            for one, times in _counted(seconds, apart=apart):
                drafters[drafting.name].cost.observe(drafting.shape(context), one, times=times)
        self.clear()

    def _add_drafting(self, stats: StepStats, missing: Mapping[str, int]) -> None:
        for name, sequences, depth, num_drafts, took in stats.drafters:
            drafting = DraftingKind(name, sequences, depth, num_drafts, missing.get(name, 0))
            self._drafters.setdefault(drafting, []).append(took)

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._target.clear()
        self._drafters.clear()


def _counted(seconds: list[float], *, apart: bool) -> list[tuple[float, int]]:
    """Times of one kind, and for how many each stands: every one `apart`, or one for all of them.

    The one is their mean, those far from their median counted as less far: a median alone would be
    below what steps take, since most of their noise makes them longer, and shapes that are seldom
    seen, whose times come one by one, would seem dearer than the usual ones. Where the machine
    changed its speed meanwhile, no number stands for all.
    """
    count = len(seconds)
    if apart or count == 1:
        return [(one, 1) for one in seconds]
    ordered, quarter = sorted(seconds), count // 4
    if ordered[-1 - quarter] > 2.0 * ordered[quarter]:
        return [(one, 1) for one in seconds]
    median = ordered[count // 2]
    low, high = median / _FAR, median * _FAR
    return [(sum(min(max(one, low), high) for one in seconds) / count, count)]
