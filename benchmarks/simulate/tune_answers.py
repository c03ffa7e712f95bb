"""A server under test on a virtual clock: modelled steps, and all that spoils real measurements.

Answers come from `serving.py`, which the engine's own scheduler runs. What is added to them: one
start is faster or slower than another, the machine drifts, requests scatter with heavy tails and
now and then one takes a multiple. The truth, without all of that, can be asked for.
"""

import math
from dataclasses import dataclass, field, replace
from typing import final

import numpy as np

from benchmarks.simulate.arms import ControlArm, FixedArm, ScheduledArm, SimulatedArm
from benchmarks.simulate.machine import SimulatedMachine
from benchmarks.simulate.serving import ServedRequest, ServingLimits, simulate
from benchmarks.simulate.traffic import RequestClass, Traffic
from foretoken.lab.tune.settings import (
    OFF,
    Answered,
    LoadSeen,
    NextVisit,
    Setting,
    Visit,
    ranges_of,
    summarize_load,
)

TURNS = 6
"""Different sets of prompts; after them they come again."""
TRUE_REQUESTS = 5
"""Requests for each one in flight that the truth is taken from."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What makes two measurements of the same differ."""

    start_sd: float = 0.05
    """From start to start, of the logarithm."""
    drift_sd: float = 0.03
    drift_memory: float = 0.8
    """What of the drift is left at the next visit."""
    request_sd: float = 0.1
    """Of requests, by Student's t with three degrees of freedom."""
    outliers: float = 0.01
    """Share of requests that take two to six times as long."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCase:
    """A server whose best setting can be known."""

    name: str
    machine: SimulatedMachine
    classes: tuple[RequestClass, ...]
    loads: tuple[int, ...]
    start_s: float = 60.0
    """Until it answers."""
    disturbance: Disturbance = field(default_factory=Disturbance)

    @property
    def limits(self) -> ServingLimits:
        """A server with memory enough."""
        return ServingLimits(
            max_num_seqs=max(self.loads),
            num_pages=1 << 16,
            max_num_batched_tokens=8192,
            noise=0.0,
        )


@final
class SimulatedAnswers:
    """Undisturbed answers of one case; each is computed once."""

    def __init__(self, case: SimulatedCase) -> None:
        self.case = case
        self._known: dict[tuple[Setting, int, int, int], list[ServedRequest]] = {}

    def at(self, setting: Setting, load: int, requests: int, prompts: int) -> list[ServedRequest]:
        """What so many requests come to, at a load."""
        key = (setting, load, requests, prompts)
        if key not in self._known:
            case = self.case
            traffic = Traffic(classes=case.classes, requests=requests, clients=load, seed=prompts)
            machine, arm = self._arm(setting)
            limits = replace(case.limits, noise=0.05) if setting.decides_itself else case.limits
            self._known[key] = simulate(machine, arm, traffic, limits).requests
        return self._known[key]

    def _arm(self, setting: Setting) -> tuple[SimulatedMachine, SimulatedArm]:
        machine = self.case.machine
        if setting.is_off:
            return machine, FixedArm(0)
        if setting.decides_itself:
            return machine, ControlArm()
        alone = replace(machine, drafters=(machine.drafter(setting.drafter),))
        if len(setting.lengths) == 1:
            return alone, FixedArm(setting.lengths[0])
        return alone, ScheduledArm(ranges_of(setting.lengths, self.case.loads))

    def true_pace(self, setting: Setting, load: int) -> float:
        """Seconds per token without any disturbance, over many requests."""
        requests = max(TRUE_REQUESTS * load, 160)
        served = self.at(setting, load, requests, TURNS)
        return sum(one.ended - one.arrival for one in served) / sum(one.tokens for one in served)

    def true_value(self, setting: Setting) -> float:
        """Mean logarithm of the true gain over the loads."""
        logs = [
            math.log(self.true_pace(OFF, load) / self.true_pace(setting, load))
            for load in self.case.loads
        ]
        return sum(logs) / len(logs)


@final
class SimulatedServer:
    """A server under test on a virtual clock."""

    def __init__(self, answers: SimulatedAnswers, seed: int) -> None:
        self._answers, self._random = answers, np.random.default_rng(seed)
        self._drift = 0.0
        self._first_prompts = seed % TURNS

    def visit(self, wanted: NextVisit) -> Visit:
        """Start it, ask, and stop it."""
        case, random = self._answers.case, self._random
        law = case.disturbance
        fresh = math.sqrt(1.0 - law.drift_memory**2) * random.normal(0.0, law.drift_sd)
        self._drift = law.drift_memory * self._drift + fresh
        slower = math.exp(self._drift + random.normal(0.0, law.start_sd))
        prompts = (wanted.turn + self._first_prompts) % TURNS
        seen = [self._ask(wanted.setting, *size, prompts, slower) for size in wanted.sizes]
        start_s = case.start_s * float(random.uniform(0.9, 1.2))
        return Visit(
            setting=wanted.setting,
            turn=wanted.turn,
            check=wanted.check,
            loads=tuple(seen),
            start_s=start_s,
            seconds=start_s + sum(one.seconds for one in seen),
        )

    def _ask(
        self, setting: Setting, load: int, requests: int, prompts: int, slower: float
    ) -> LoadSeen:
        law, random = self._answers.case.disturbance, self._random
        served = self._answers.at(setting, load, requests, prompts)
        answers = []
        for one in served:
            factor = slower * math.exp(law.request_sd * float(random.standard_t(3)) / math.sqrt(3))
            if random.random() < law.outliers:
                factor *= float(random.uniform(2.0, 6.0))
            answers.append(Answered(one.kind, factor * (one.ended - one.arrival), one.tokens))
        seconds = slower * max(one.ended for one in served)
        return summarize_load(load, answers, seconds=seconds)
