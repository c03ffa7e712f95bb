"""What steps take: the one place that is asked, and that is told what they took.

Behind it are the models of the target's step and of each drafter. Times of the last few steps are
gathered so that learning from them costs little: steps of one shape are learnt together by a mean
that no single slow step moves.
"""

import math
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple, final

import numpy as np

from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import READ_TOGETHER, DrafterCost, DraftShape
from foretoken.control.learned.regression import NOISE, OUTLIER, Floats
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import DraftOutcome, DraftPlan, StepLoad
from foretoken.types import StepStats

_FAR = math.exp(OUTLIER * NOISE)
"""Times the median beyond which a step is an outlier, as for the regression that learns from it."""
_APART = 512
"""Steps that are learnt from one by one."""


class SeenStep(NamedTuple):
    """A step that is over."""

    plan: DraftPlan
    outcomes: Seq[DraftOutcome]
    stats: StepStats
    deciding_s: float
    """What deciding took of it."""
    begins: bool
    """Whether it is the first after the prompts of who decodes."""


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


class PlainTimes(NamedTuple):
    """Seconds of a step without drafts."""

    plain_s: float
    """Of the sequences that decode."""
    prompt_s: float
    """What prompts add."""


@final
class StepTimeModels:
    """Seconds of steps by their shape."""

    __slots__ = ("_drafters", "_target", "costs", "count", "target")

    def __init__(self, target: TargetStepTimeModel, costs: Mapping[str, DrafterCost]) -> None:
        """As the models know them: of the target's step, and of each drafter by name."""
        self.target, self.costs = target, costs
        self.count = 0
        """Steps that are not learnt from yet."""
        self._target: dict[tuple[int, int, int, int], tuple[list[float], list[float]]] = {}
        """Their seconds, and the experts that they read."""
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
            if decoding == 1 and sum(missing.values()) >= READ_TOGETHER:
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
        known, read = self._target.setdefault(key, ([], []))
        known.append(seconds)
        read.append(stats.experts_read)
        self._add_drafting(stats, missing)

    def plain(self, shape: StepShape, count: int) -> PlainTimes:
        """Of the step of `shape` without drafts, in which `count` sequences decode."""
        alone = shape._replace(rows=count, sequences=count, prompt_rows=0)
        plain_s = float(self.target.curve(alone, 0)[0])
        if not shape.prompt_rows:
            return PlainTimes(plain_s, 0.0)
        return PlainTimes(plain_s, float(self.target.curve(shape, 0)[0]) - plain_s)

    def added(self, shape: StepShape, count: int, most: int) -> Floats:
        """What 0 to `most` drafts add to that step, checking them included, [most + 1].

        Prompts take what they take, whether anybody drafts beside them or not. A draft is worth the
        time that it saves in steps to come: that of steps without prompts.
        """
        model_s = self.target.curve(shape, most)
        more_s: Floats = model_s - model_s[0]
        if shape.prompt_rows:
            # Beside many rows some more may be cheap, and what is begun now goes on without them.
            alone_s = self.target.curve(StepShape(count, count, shape.context), most)
            more_s = np.maximum(more_s, alone_s - alone_s[0])
        return more_s

    def passes(self, sequences: int, context: float) -> dict[str, float]:
        """What a pass of each drafter takes for so many sequences; of one that has a single pass,
        all of its drafting."""
        found = {}
        for name, cost in self.costs.items():
            curve = cost.drafting(max(sequences, 1), 2, context)
            found[name] = float(curve[1] if cost.one_pass else curve[2] - curve[1])
        return found

    def by_rows(self, context: float) -> list[dict[str, float]]:
        """Plain steps of 1, 2, 4, ... sequences."""
        shapes = [StepShape(1 << power, 1 << power, context) for power in range(7)]
        return [{"rows": shape.rows, "seconds": self.target.seconds(shape)} for shape in shapes]

    def error(self) -> dict[str, Any] | None:
        """P50 and P90 of how far the target's steps are from what was predicted, as shares of it;
        None before any was learnt from."""
        middle, high = self.target.error
        if math.isnan(middle):
            return None
        return {"p50": math.expm1(middle), "p90": math.expm1(high), "steps": self.target.steps}

    def describe(self) -> dict[str, Any]:
        """What is known, for people."""
        drafters = {name: cost.describe() for name, cost in self.costs.items()}
        return {"target": self.target.describe(), "drafters": drafters}

    def learn(self, context: float) -> None:
        """Steps of sequences of so many tokens are learnt from, and forgotten: those of a shape by
        their middle, once there were enough to begin with."""
        # At first every step counts: so much depends on what the first ones take.
        apart = self.target.steps < _APART
        for (decoding, prefilling, prompt, drafted), (known, read) in self._target.items():
            shape = StepShape(
                rows=decoding + prompt + drafted,
                sequences=decoding + prefilling,
                context=context,
                prompt_rows=prompt,
            )
            told = _counted(known, apart=apart)
            if len(told) < len(read):
                read = [sum(read) / len(read)]
            for (one, times), experts in zip(told, read, strict=True):
                self.target.observe(shape._replace(experts=experts), one, times=times)
        for drafting, seconds in self._drafters.items():
            if drafting.name not in self.costs or not drafting.sequences:
                continue
            for one, times in _counted(seconds, apart=apart):
                self.costs[drafting.name].observe(drafting.shape(context), one, times=times)
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
