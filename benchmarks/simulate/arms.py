"""Who decides how far to draft in a simulated run: nobody, a fixed length, or adaptive control.

The controls are those of the engine. What they know of the machine at the start is what the engine
would have timed: some shapes, with an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Protocol, final

from benchmarks.simulate.machine import MixtureCost, SimulatedDrafter, SimulatedMachine
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import LoadLimit, RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    StepLoad,
    plan_no_drafts,
)
from foretoken.types import StepStats

_TIMED_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
_TIMED_SEQUENCES = (1, 4, 16, 64)
_USUAL_CHANCE = 0.7

Missing = Callable[[str, Any], int]
"""(drafter, sequence) -> tokens that the drafter has not read."""


class Deciding(Protocol):
    def plan(self, sequences: Sequence[DecodingSequence], load: StepLoad) -> DraftPlan:
        """How far each sequence drafts in the next step."""

    def observe(self, plan: DraftPlan, outcomes: Sequence[DraftOutcome], stats: StepStats) -> None:
        """What became of a step."""

    def release(self, request_id: str) -> None:
        """A request ended."""


class SimulatedArm(Protocol):
    """One way to decide, to be built for each run."""

    @property
    def name(self) -> str:
        """In a few characters."""

    def build(self, machine: SimulatedMachine, missing: Missing) -> Deciding:
        """Nothing learnt yet."""


@final
class _Fixed:
    """Decides by settings alone."""

    def __init__(self, limits: dict[str, int], limit: LoadLimit | None = None) -> None:
        self.plan = RequestBudget(limits, limit).plan if limits else plan_no_drafts

    def observe(self, plan: DraftPlan, outcomes: Sequence[DraftOutcome], stats: StepStats) -> None:
        """Learn nothing."""

    def release(self, request_id: str) -> None:
        """Forget nothing."""


@final
@dataclass(frozen=True, slots=True)
class FixedArm:
    """As many drafts as the settings say, whatever comes of them; 0: plain decoding."""

    k: int

    @property
    def name(self) -> str:
        """`off`, or the length."""
        return f"k={self.k}" if self.k else "off"

    def build(self, machine: SimulatedMachine, missing: Missing) -> Deciding:
        """The first drafter that finds anything drafts."""
        drafters = machine.drafters if self.k else ()
        return _Fixed({one.name: min(one.max_drafts, self.k) for one in drafters})


@final
@dataclass(frozen=True, slots=True)
class ScheduledArm:
    """Lengths by the number of running requests, as `num_speculative_tokens_per_batch_size`."""

    ranges: tuple[tuple[int, int, int], ...]
    """(first, last, length)."""
    name: str = "schedule"

    def build(self, machine: SimulatedMachine, missing: Missing) -> Deciding:
        """The first drafter that finds anything drafts."""
        most = max(length for _, _, length in self.ranges)
        limits = {one.name: min(one.max_drafts, most) for one in machine.drafters}
        return _Fixed(limits, LoadLimit(self.ranges))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ControlArm:
    """The control of the engine."""

    name: str = "control"
    error: float = 0.1
    """Standard deviation of the logarithm of what it was told of the machine."""
    factor: float = 1.0
    """What it was told is wrong by this factor throughout."""
    usual: float = _USUAL_CHANCE
    """The chance of a first draft that it begins with."""
    seed: int = 1
    counts_experts: bool = True
    """Whether it is told what steps of a mixture read; else all rows are alike to it."""

    def build(self, machine: SimulatedMachine, missing: Missing) -> AdaptiveControl:
        """What was timed at the start, and nothing else, is known."""
        wrong = Random(self.seed)

        def timed(seconds: float) -> float:
            return self.factor * seconds * wrong.lognormvariate(0.0, self.error)

        sd, shapes, experts = max(self.error, 0.1), _target_shapes(), None
        if isinstance(machine.target, MixtureCost):
            count, used = machine.target.read.count, machine.target.read.used
            # A start drafts one token again and again, and every sequence has one of its own.
            start = ExpertsRead(count, used, (1.0, float(not self.counts_experts), 1.0))
            shapes = [shape._replace(experts=start.expected(shape)) for shape in shapes]
            experts = ExpertsRead(count, used) if self.counts_experts else None
        target = TargetStepTimeModel(
            [(shape, timed(machine.target_s(shape, shape.rows))) for shape in shapes],
            sd=sd,
            experts=experts,
        )
        costs = {}
        for one in machine.drafters:
            known = [(shape, timed(_drafted_s(one, shape))) for shape in _draft_shapes(one)]
            quick = one.one_pass or one.looks_up
            costs[one.name] = DrafterCost(known, sd=sd, one_pass=quick, machine=target)
        return begin_control(machine, missing, target, costs, self.usual)


def begin_control(
    machine: SimulatedMachine,
    missing: Missing,
    target: TargetStepTimeModel,
    costs: Mapping[str, DrafterCost],
    usual: float = _USUAL_CHANCE,
) -> AdaptiveControl:
    """The control of the engine with what it knows of times at the start, drafters' by name, and
    the chance of a first draft that it begins with."""
    planner = Planner(
        RequestBudget({one.name: one.max_drafts for one in machine.drafters}),
        [
            DrafterFacts(
                name=one.name,
                max_drafts=one.max_drafts,
                looks_up=one.looks_up,
                missing=partial(missing, one.name),
                max_window=one.max_window,
                reads_features=one.reads_features,
            )
            for one in machine.drafters
        ],
        target,
        dict(costs),
        LearnedAcceptance({one.name: usual for one in machine.drafters}),
    )
    # On a virtual clock deciding takes no time: a run is the same on every machine.
    return AdaptiveControl(planner, clock=lambda: 0.0)


def _target_shapes() -> list[StepShape]:
    """Decoding at three contexts, verification of longer spans, and prompts."""
    shapes = [StepShape(rows, rows, at) for rows in _TIMED_ROWS for at in (64.0, 1024.0, 4096.0)]
    shapes += [StepShape(5 * num, num, at) for num in (1, 4, 16) for at in (64.0, 2048.0)]
    shapes += [StepShape(rows, 1, rows / 2, rows) for rows in (256, 1024, 2048)]
    return shapes


def _draft_shapes(one: SimulatedDrafter) -> list[DraftShape]:
    depths = (1,) if one.one_pass or one.looks_up else (1, 2, 4)
    shapes = [
        DraftShape(num, depth, num * depth, at, fed)
        for num in _TIMED_SEQUENCES
        for depth in depths
        for at in (64.0, 1024.0)
        for fed in ((0, 64) if one.reads else (0,))
    ]
    reads = one.reads and not one.looks_up
    return shapes + [DraftShape(1, 0, 0, 512.0, fed) for fed in (16, 256, 1024) if reads]


def _drafted_s(one: SimulatedDrafter, shape: DraftShape) -> float:
    lengths = [shape.passes] * shape.sequences if shape.passes else []
    return one.drafting_s(lengths, shape.context) + one.reading_s(shape.fed_rows, shape.context)
