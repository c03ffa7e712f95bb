"""What is worth trying on a server: which drafters, which settings of them load at all, and what a
plan expects of each where the model and the device are known.

Where nobody has said: look-ups cost nothing to set up; what the user's command drafts with is what
they came from; a packaged model has drafters of its own. Everything else has to be named. A search
that is told what to expect begins with these gains instead of none: drafters that promise most come
first, and what promises nothing is not started unless what is measured speaks for it. Knows no
server.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from foretoken.config.auto import auto_drafters
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.drafting import DraftingSetup
from foretoken.lab.launch.engines import refusal
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.fit import Machine, is_known, planned_settings, unsaid_bits, why_not_loaded
from foretoken.lab.plan.predict import MethodOutlook, PlannedSpeed, method_outlooks, predict
from foretoken.lab.plan.setup import PlanSettings, planned_methods, resolve_setup
from foretoken.lab.plan.speedup import MOST_K
from foretoken.lab.tune.server_command import CONTROL, TEMPLATE, Commands, ServerCommand
from foretoken.lab.tune.settings import OFF, Setting

LENGTHS = (1, 2, 3, 5, 8)
_LOOKUP = DraftingSetup("ngram")


def offered(command: ServerCommand, named: Sequence[str]) -> dict[str, DraftingSetup]:
    """The drafters to try, by name: those that are named, else those that are there.

    Raises:
        ConfigError: a drafter is named that cannot be.
    """
    if command.engine == "template":
        if named:
            allowed = "none beside a command with {k}, which names its drafter itself"
            raise ConfigError("--drafter", named[0], allowed)
        return {}
    found = [DraftingSetup.parse(text) for text in named]
    if not found:
        found = [command.given] if command.given else []
        found += _packaged(command) if command.engine == "foretoken" else [_LOOKUP]
    by_name: dict[str, DraftingSetup] = {}
    for one in found:
        by_name.setdefault(one.name, one)  # the user's own, with the user's own words
    return by_name


def only_looks_up(drafters: Mapping[str, DraftingSetup]) -> bool:
    """Whether nothing with weights is among them, so that naming one may find more."""
    return bool(drafters) and all(one.model is None for one in drafters.values())


def _packaged(command: ServerCommand) -> list[DraftingSetup]:
    drafters = auto_drafters(command.model)
    with_weights = [one for one in drafters if one.model]
    return [_LOOKUP] + [DraftingSetup(one.method, str(one.model)) for one in with_weights[:1]]


def settings_of(
    command: ServerCommand,
    drafters: Sequence[str],
    lengths: Sequence[int],
    more: Mapping[str, Sequence[int]] | None = None,
) -> tuple[Setting, ...]:
    """Every drafter at every length, those of `more` for it included, and Foretoken's own
    control."""
    if command.engine == "template":
        return tuple(Setting(TEMPLATE, (length,)) for length in lengths)
    own = (Setting(CONTROL),) if command.engine == "foretoken" else ()
    return own + tuple(
        Setting(drafter, (length,))
        for drafter in drafters
        for length in sorted({*lengths, *(more or {}).get(drafter, ())})
    )


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
    launch = next(iter(read_source(shlex.join(command.words)).launches), None)
    if launch is None or unsaid_bits(launch):
        return None
    settings = planned_settings(launch, machine)
    return None if settings is None else replace(settings, workload="mixed")


def _plan_of(
    drafter: DraftingSetup, base: PlanSettings, loads: Sequence[int]
) -> PlannedSpeed | None:
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """The settings that may be started."""

    settings: tuple[Setting, ...]
    said: tuple[str, ...] = ()


def that_load(
    settings: Sequence[Setting], commands: Commands, machine: Machine, server: str
) -> Loading:
    """The settings whose command loads on a machine; without a device only the models and their
    ranks are looked at.

    Raises:
        ConfigError: the server does not load without speculation, or with none of the settings.
    """
    where = f" on {machine.count} x {machine.device}" if machine.device else ""
    if (plain := _refusal(commands, OFF, machine)) is not None:
        raise ConfigError("SERVER", server, f"a command that loads{where}: {_words(plain)}")
    refused: dict[str, Finding] = {}
    kept = []
    for name in dict.fromkeys(setting.drafter for setting in settings):
        own = [setting for setting in settings if setting.drafter == name]
        # More drafts need more of everything, so where the most load the others do.
        most = max(own, key=lambda setting: max(setting.lengths, default=0))
        if (found := _refusal(commands, most, machine)) is not None:
            refused[name] = found
            own = [one for one in own if one != most and not _refusal(commands, one, machine)]
        kept += own
    if refused and not kept:
        name, found = next(iter(refused.items()))
        raise ConfigError("--drafter", name, f"one that loads{where}: {_words(found)}")
    said = (f"not started with {name}{where}: {_words(found)}" for name, found in refused.items())
    return Loading(settings=tuple(kept), said=tuple(said))


def only_those(hoped: Expectation, loading: Loading) -> Expectation:
    """What is expected of the drafters that may be started, and why others are not."""
    there = {setting.drafter for setting in loading.settings}
    return replace(
        hoped,
        drafters={name: one for name, one in hoped.drafters.items() if name in there},
        gains=tuple(own for own in hoped.gains if own[0] in there),
        said=(*loading.said, *hoped.said),
    )


def _refusal(commands: Commands, setting: Setting, machine: Machine) -> Finding | None:
    launch = next(iter(read_source(commands.to_type(setting)).launches), None)
    return None if launch is None else why_not_loaded(launch, machine)


def _words(finding: Finding) -> str:
    return f"{finding.message} ({finding.remedy})" if finding.remedy else finding.message
