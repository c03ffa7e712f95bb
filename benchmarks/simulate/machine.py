"""What steps take on a simulated machine, what a server adds around them, and noise.

Noise is that of machines that are shared: it lasts for some steps, and now and then a step takes a
multiple of its time. Knows neither requests nor tokens.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import NamedTuple, final

import numpy as np

from foretoken.control.cost import CostModel, StepShape
from foretoken.control.learned.drafter_cost import DrafterCost
from foretoken.control.learned.experts_read import ExpertsRead
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.errors import ConfigError
from foretoken.lab.plan.predict import step_models
from foretoken.lab.plan.setup import EngineCost, PlanSettings, resolve_setup

HOST_S = 1e-3
"""Of every step of a server on a GPU, beside its kernels: an assumption."""
LOOKUP_S = 1e-4
"""Of looking drafts up in text, once a step: an assumption."""


@final
@dataclass(frozen=True, slots=True)
class LineCost(CostModel):
    """A straight line: the first row, and what each further one adds. Learns nothing."""

    first_s: float = 1.0
    """1: times are in plain steps."""
    row_s: float = 0.0

    def seconds(self, shape: StepShape) -> float:
        """The line at `shape.rows`."""
        return self.first_s + self.row_s * (shape.rows - 1)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureCost(CostModel):
    """A mixture of experts: what every step reads, its rows, and the experts that these choose."""

    read: ExpertsRead
    """How many that are, by what rows of sequences, drafts and prompts count for."""
    step_s: float
    row_s: float
    expert_s: float

    def with_experts(self, shape: StepShape) -> StepShape:
        """The step and what it reads."""
        return shape._replace(experts=shape.experts or self.read.expected(shape))

    def seconds(self, shape: StepShape) -> float:
        """By what it reads, or would read."""
        experts = self.with_experts(shape).experts
        return self.step_s + self.row_s * shape.rows + self.expert_s * experts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedDrafter:
    """One drafter: who it is, and what its passes take."""

    name: str
    max_drafts: int = 5
    """Drafts per sequence and step."""
    passes: CostModel = LineCost(0.0, 0.0)
    """Of one pass over some rows, and of reading tokens that it missed."""
    call_s: float = 0.0
    """Of drafting in a step, beside the passes."""
    sequence_s: float = 0.0
    """The same for each sequence that has drafts."""
    one_pass: bool = False
    """All drafts of a step come from one pass, of as many rows."""
    looks_up: bool = False
    """It finds drafts in text: no passes, nothing to read before."""
    reads: bool = True
    """Whether it has keys and values of its own, so that it must read what it missed."""
    max_window: int = 0
    """Most of the latest tokens that it may take for a whole sequence; 0: it has to read all."""
    reads_features: bool = False
    """Whether it drafts from hidden states of the target."""

    def drafting_s(self, lengths: Sequence[int], context: float) -> float:
        """Drafts of these lengths, one for each sequence."""
        if not lengths:
            return 0.0
        seconds = self.call_s + self.sequence_s * len(lengths)
        for depth in range(1 if self.one_pass else max(lengths)):
            rows = sum(length > depth for length in lengths)
            if self.one_pass and not self.looks_up:
                rows = sum(lengths)
            seconds += self.passes.seconds(StepShape(rows, rows, context))
        return seconds

    def reading_s(self, rows: int, context: float) -> float:
        """Reading so many tokens that it missed."""
        return self.passes.seconds(StepShape(rows, 1, context)) if rows else 0.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCost:
    """Time outside of steps, of which the engine is told nothing."""

    step_s: float = 0.0
    """Between two steps."""
    token_s: float = 0.0
    """Between two steps, for each token that the first one gave."""
    request_s: float = 0.0
    """From when a client asks until its request waits for a step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMachine:
    """A target and its drafters on one machine, without noise."""

    target: CostModel
    drafters: tuple[SimulatedDrafter, ...] = ()
    host_s: float = 0.0
    """Of every step, beside the forward pass."""
    token_s: float = 0.0
    """Of every token that a step gives, beside the forward pass."""
    cold_drafting: float = 1.0
    """How many times as long drafting takes in a step that follows one without drafts."""
    cold_target: float = 1.0
    """The same for the rest of such a step."""
    server: ServerCost = ServerCost()

    def target_s(self, shape: StepShape, tokens: int) -> float:
        """All of a step that gives so many tokens, but drafting."""
        return self.host_s + self.token_s * tokens + self.target.seconds(shape)

    def drafter(self, name: str) -> SimulatedDrafter:
        return next(one for one in self.drafters if one.name == name)


@final
class MachineNoise:
    """Noise of step times: a lognormal factor, correlated from step to step, spikes that add a
    multiple of a usual step, and a speed that wanders over some hundred steps."""

    MEMORY = 0.7
    WANDER_MEMORY = 0.99
    SPIKES, SPIKE = 0.01, 3.0

    def __init__(self, sd: float, seed: int, *, wander: float = 0.0) -> None:
        """`sd` of the logarithm, and `wander` that of the speed; `sd` 0: none of all."""
        self._sd, self._random = sd, Random(seed)
        self._log = self._usual_s = 0.0
        self._wander, self._speeds = wander, Random(f"speeds {seed}")
        self._speed = 0.0

    def factor(self, seconds: float) -> float:
        """What a step is multiplied by that would take so long."""
        if not self._sd:
            return 1.0
        fresh = math.sqrt(1.0 - self.MEMORY**2) * self._random.gauss(0.0, self._sd)
        self._log = self.MEMORY * self._log + fresh
        self._usual_s = self._usual_s or seconds
        self._usual_s += 0.05 * (min(seconds, 2.0 * self._usual_s) - self._usual_s)
        spike = self.SPIKE * self._usual_s if self._random.random() < self.SPIKES else 0.0
        if self._wander:
            fresh = math.sqrt(1.0 - self.WANDER_MEMORY**2) * self._speeds.gauss(0.0, self._wander)
            self._speed = self.WANDER_MEMORY * self._speed + fresh
        return math.exp(self._log + self._speed) + spike / seconds


@final
@dataclass(frozen=True, slots=True)
class TableCost(CostModel):
    """Seconds by rows as they were measured, straight in between, and seconds per key read."""

    points: tuple[tuple[int, float], ...]
    """(rows, seconds), ascending."""
    key_s: float = 0.0
    """What each token that a sequence attends to adds."""

    def seconds(self, shape: StepShape) -> float:
        """Beyond the last point the last slope goes on."""
        points = self.points
        place = min(max(bisect_left([rows for rows, _ in points], shape.rows), 1), len(points) - 1)
        (low, low_s), (high, high_s) = points[place - 1], points[place]
        seconds = low_s + (high_s - low_s) / (high - low) * (shape.rows - low)
        return seconds + self.key_s * shape.sequences * shape.context


def machine_of_costs(path: Path) -> SimulatedMachine:
    """The machine that an engine got to know: a file of `foretoken.control.learned.cost_file`.

    Raises:
        ConfigError: no such file, or it holds no costs.
    """
    try:
        found = json.loads(path.read_text("utf-8"))
        target = TargetStepTimeModel.from_dict(found["target"])
        drafters = {name: DrafterCost.from_dict(kept) for name, kept in found["drafters"].items()}
    except (OSError, ValueError, TypeError, KeyError) as error:
        allowed = "a file of costs that `foretoken info --costs` names"
        raise ConfigError("--costs", str(path), allowed) from error
    return machine_of_models(target, drafters)


def machine_of_models(target: CostModel, drafters: Mapping[str, DrafterCost]) -> SimulatedMachine:
    """The machine that an engine's models of time describe."""
    known = tuple(_known_drafter(name, cost) for name, cost in drafters.items())
    return SimulatedMachine(target=target, drafters=known)


def _known_drafter(name: str, cost: DrafterCost) -> SimulatedDrafter:
    _, one, two = cost.drafting(1, 2, 0.0).tolist()
    return SimulatedDrafter(
        name=name,
        passes=_LearnedPass(cost),
        call_s=0.0 if cost.one_pass else 2.0 * one - two - cost.sequence_s,
        sequence_s=cost.sequence_s,
        one_pass=cost.one_pass,
        reads=cost.reads,
    )


@final
class _LearnedPass(CostModel):
    """A pass of a drafter of which an engine knows the costs."""

    def __init__(self, cost: DrafterCost) -> None:
        self._cost = cost

    def seconds(self, shape: StepShape) -> float:
        """Of drafting where every row is a sequence's, else of reading."""
        if shape.rows > shape.sequences:
            return self._cost.feeding(shape.rows, shape.context)
        _, one, two = self._cost.drafting(shape.sequences, 2, shape.context).tolist()
        pass_s = one - self._cost.sequence_s * shape.sequences
        return float(pass_s if self._cost.one_pass else two - one)


def planned_machine(
    settings: PlanSettings, name: str = "draft", *, host: EngineCost | None = None
) -> SimulatedMachine:
    """A target and its drafter on the devices of a plan, by data sheet: `foretoken lab plan`;
    `host`: what its engine adds, if not what the plan assumes.

    Raises:
        ConfigError: an unknown device, or a method that lacks its draft.
        ModelNotFoundError: an unknown model.
    """
    setup = resolve_setup(settings)
    target, passes = step_models(setup if host is None else replace(setup, host=host))
    method = setup.drafting
    if method is None:
        return SimulatedMachine(target=target, host_s=HOST_S)
    one = SimulatedDrafter(
        name=name,
        max_drafts=setup.k,
        passes=passes or LineCost(0.0),
        call_s=LOOKUP_S if passes is None else 0.0,
        one_pass=setup.drafts_in_one_pass,
        looks_up=passes is None,
        reads=method.own_kv,
        reads_features=method.drafts_with == "head",
    )
    return SimulatedMachine(target=target, drafters=(one,), host_s=HOST_S)


class WatchedRound(NamedTuple):
    """What a server did while clients asked one request after the other."""

    seconds: float
    """From the first request to the last token."""
    steps_s: float
    """Of that, the time of steps."""
    steps: float
    tokens: float
    """Of all answers."""
    requests_alone: float
    """Requests that found nobody else there: the engine waited for them."""


def measured_server_cost(rounds: Sequence[WatchedRound]) -> ServerCost:
    """The cost that explains what was not spent in steps, by least squares.

    The parts can be told apart if some rounds had one client and some many.
    """
    outside_N = np.array([one.seconds - one.steps_s for one in rounds])
    counts_NP = np.array([(one.steps, one.tokens, one.requests_alone) for one in rounds], float)
    # Long rounds are no better known than short ones, as a share.
    weights_N = 1.0 / np.array([one.seconds for one in rounds])
    found_P, left = np.zeros(3), [0, 1, 2]
    while left:
        some_NP = counts_NP[:, left] * weights_N[:, None]
        values = np.linalg.lstsq(some_NP, outside_N * weights_N, rcond=None)[0]
        if values.min() >= 0.0:
            found_P[left] = values
            break
        # A part that comes out negative is too small to be seen.
        del left[int(values.argmin())]
    step_s, token_s, request_s = found_P.tolist()
    return ServerCost(step_s=step_s, token_s=token_s, request_s=request_s)
