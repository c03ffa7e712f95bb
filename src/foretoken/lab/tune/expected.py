"""What a plan expects of a server's settings, where its model and its device are known.

A search that is told so begins with these gains instead of none: drafters that promise most come
first, lengths that suit the loads are among the tried ones, and what promises nothing is not
started unless what is measured speaks for it. Knows no server.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from foretoken.lab.launch.drafting import DraftingSetup
from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.fit import Machine, is_known, planned_settings, unsaid_bits
from foretoken.lab.plan.predict import PlannedSpeed, predict
from foretoken.lab.plan.ranking import MethodOutlook, method_outlooks
from foretoken.lab.plan.setup import PlanSettings, planned_methods, resolve_setup
from foretoken.lab.plan.speedup import MOST_K
from foretoken.lab.tune.server_command import ServerCommand

_CLEARLY = 1.05
"""Times the gain of what is there, from which a drafter that is not is worth naming."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What is expected before anything is measured."""

    drafters: Mapping[str, DraftingSetup]
    """To be tried, those that promise most first."""
    gains: tuple[tuple[str, int, tuple[float, ...]], ...] = ()
    """As `Question.expected`: (drafter, length, gain at each load)."""
    best: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Drafter -> the lengths that promise most, at one load or another."""
    said: tuple[str, ...] = ()
    """Sentences: what nothing is expected of, and what would promise more."""


def expect(
    command: ServerCommand,
    drafters: Mapping[str, DraftingSetup],
    machine: Machine,
    *,
    loads: Sequence[int],
    lengths: Sequence[int],
    may_add: bool,
) -> Expectation:
    """The plan's gains of every drafter and length at every load.

    Args:
        command: the server's, whose model and ranks count.
        drafters: what is tried anyhow.
        machine: where it runs.
        loads: requests in flight.
        lengths: drafts per step that are tried anyhow.
        may_add: whether methods that need nothing new may be added.

    Raises:
        ConfigError: the device is not known.
    """
    base = _base(command, machine)
    if base is None:
        why = f"nothing is expected of {command.model or 'this model'}: its sizes are not known"
        return Expectation(drafters=drafters, said=(why,))
    outlooks = method_outlooks(resolve_setup(base))
    tried = {**drafters, **(_free(command, outlooks) if may_add else {})}
    plans = {name: _plan_of(one, base, loads) for name, one in tried.items()}
    known = {name: plan for name, plan in plans.items() if plan is not None}
    best = {
        name: tuple(sorted({plan.at(load).best_k for load in loads} - {0}))
        for name, plan in known.items()
    }
    gains = tuple(
        (name, length, tuple(plan.at(load).gain(length).middle for load in loads))
        for name, plan in known.items()
        for length in sorted({*lengths, *best[name]})
        if length <= MOST_K
    )
    order = sorted(tried, key=lambda name: -_most(known.get(name), loads))
    unknown = [
        f"nothing is expected of {name}: no plan knows it" for name in tried if name not in known
    ]
    return Expectation(
        drafters={name: tried[name] for name in order},
        gains=gains,
        best=best,
        said=(*unknown, *_would_promise_more(outlooks, tuple(known.values()), loads)),
    )


def _base(command: ServerCommand, machine: Machine) -> PlanSettings | None:
    """The server without speculation as a plan's settings; None where its model is not known."""
    launch = next(iter(read_source(shlex.join(command.words)).launches), None)
    if launch is None or unsaid_bits(launch):
        return None
    settings = planned_settings(launch, machine)
    return None if settings is None else replace(settings, workload="mixed")


def _plan_of(
    drafter: DraftingSetup, base: PlanSettings, loads: Sequence[int]
) -> PlannedSpeed | None:
    """The prediction for a drafter; None where no plan knows it."""
    method = planned_methods().get(drafter.method)
    if method is None:
        return None
    draft = drafter.model if method.drafts_with == "model" else None
    if method.drafts_with == "model" and (draft is None or not is_known(draft)):
        return None
    settings = replace(
        base, method=drafter.method, draft=draft, concurrency=loads[0], peak_concurrency=loads[-1]
    )
    return predict(resolve_setup(settings), loads=loads)


def _free(command: ServerCommand, outlooks: Sequence[MethodOutlook]) -> dict[str, DraftingSetup]:
    """Methods that need nothing new and that the engine can be told, as far as is known."""
    found = [
        DraftingSetup(one.method)
        for one in outlooks
        if one.available and _can_be_told(command.engine, one.method)
    ]
    return {one.name: one for one in found}


def _can_be_told(engine: str, name: str) -> bool:
    method = planned_methods()[name]
    if method.drafts_with == "model":
        return False
    return engine == "vllm" or (engine == "llama.cpp" and not refusal(engine, method))


def _most(plan: PlannedSpeed | None, loads: Sequence[int]) -> float:
    """The mean over loads of the best gains; 1 where nothing is expected."""
    return sum(plan.at(load).best for load in loads) / len(loads) if plan else 1.0


def _would_promise_more(
    outlooks: Sequence[MethodOutlook], there: Sequence[PlannedSpeed], loads: Sequence[int]
) -> list[str]:
    """The drafter that is not there and promises clearly more than what is."""
    now = max((_most(plan, loads) for plan in there), default=1.0)
    absent = [one for one in outlooks if not one.available and not one.refused]
    best = max(absent, key=lambda one: _most(one.prediction, loads), default=None)
    if best is None or _most(best.prediction, loads) < _CLEARLY * now:
        return []
    gains = ", ".join(f"{best.prediction.at(load).best:.2f}x at {load}" for load in loads)
    return [
        f"{best.method} promises more, {gains} in flight: {best.needs}; name it with "
        f"--drafter {best.method}:MODEL"
    ]
