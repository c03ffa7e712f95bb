"""From settings to whoever decides how far each step drafts, and to those that learn from a step.

Two ways: as the settings say, or adaptive control.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from foretoken.backend import plan_search
from foretoken.config import ResolvedConfig, SpeculativeConfig
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import LivePolicy, LoadLimit, RequestBudget
from foretoken.control.failsafe import Failsafe
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.keeping import CostKeeper
from foretoken.control.plan import DraftPlanner
from foretoken.control.report.journal import ControlJournal
from foretoken.control.report.reasons import by_plan, by_settings, with_floors
from foretoken.engine.step_timer import Timed
from foretoken.engine.timing import EngineCosts, find_costs, seconds_for_timing
from foretoken.kernels.threads import StepThreads
from foretoken.kv.pool import PagePool
from foretoken.proposers.choose.drafters import Drafters, draft_outcomes
from foretoken.proposers.method import FoundDrafter
from foretoken.runtime.batch import Batch
from foretoken.runtime.runner import Runner
from foretoken.runtime.verifier import Verification
from foretoken.types import StepStats

_NO_LIMIT = 1 << 30
_USUAL_CHANCE = 0.6
"""Of a first draft, where the method table knows nothing of its drafter."""

StepObserver: TypeAlias = Callable[[Batch, Verification, StepStats], None]
"""Is told of every step: the batch with its plan and drafts, the outcome, counts and times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundParts:
    """What deciding is built from."""

    config: ResolvedConfig
    drafters: Drafters
    found: Mapping[str, FoundDrafter]
    runner: Runner
    pool: PagePool
    threads: StepThreads
    """Whose threads run a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decider:
    """Who decides, who learns, and who can say what is going on."""

    plan: DraftPlanner
    observers: tuple[StepObserver, ...]
    """Told about every step."""
    live: LivePolicy
    release: Callable[[str], None]
    """Forgets a request that ended; unknown ids are fine."""
    control: AdaptiveControl | None = None
    costs: EngineCosts | None = None
    """What control learns of times; None: nobody does."""
    journal: ControlJournal | None = None
    """What was decided; None: nothing drafts."""

    def models(self) -> dict[str, Any] | None:
        """What control has learnt, and where its costs were from; None: it learns nothing."""
        if self.control is None or self.costs is None:
            return None
        return {"costs": self.costs.source, **self.control.models()}


def decide_how(parts: FoundParts) -> Decider:
    """As the settings of the engine want it."""
    drafters, user = parts.drafters, parts.config.user
    limits = {name: member.most for name, member in drafters.members.items()}
    live = LivePolicy()
    way = user.control if limits else "fixed"
    budget = RequestBudget(limits, _load_limit(user.speculative_config), live)
    costs = _costs(parts) if way == "adaptive" else None
    control = None if costs is None else _control(parts, budget, costs)
    journal = _journal(way, drafters, control) if limits else None
    keeper = None if costs is None else costs.keeper()
    if keeper is not None:
        # Nobody closes an engine; it is collected, or the process ends.
        weakref.finalize(control, keeper.close)
    learn = _learner(drafters, control, journal, keeper)
    failsafe = Failsafe(
        budget.plan if control is None else control.plan,
        tuple(limits),
        say=_nobody if journal is None else journal.fail,
    )
    return Decider(
        plan=failsafe.plan,
        observers=(failsafe.guarded(learn),),
        live=live,
        release=_nobody if control is None else failsafe.guarded(control.release),
        control=control,
        costs=costs,
        journal=journal,
    )


def _nobody(_: str) -> None:
    """There is nobody to tell."""


def _costs(parts: FoundParts) -> EngineCosts:
    """What an earlier process learnt or can be timed now."""
    timed = Timed(
        config=parts.config,
        runner=parts.runner,
        members=parts.drafters.members,
        pool=parts.pool,
        threads=parts.threads,
    )
    return find_costs(timed, most_seconds=seconds_for_timing())


def _control(parts: FoundParts, budget: RequestBudget, costs: EngineCosts) -> AdaptiveControl:
    """Adaptive control, which learns from what is known of costs on."""
    members = parts.drafters.members
    facts = [
        DrafterFacts(
            name=name,
            most=member.most,
            looks_up=member.proposer.looks_up,
            missing=member.num_missing,
            max_window=member.proposer.max_window,
            reads_features=name in parts.found and bool(parts.found[name].points),
            floor=member.floor,
        )
        for name, member in members.items()
    ]
    usual = _usual_acceptance(parts.config.user.speculative_config)
    acceptance = LearnedAcceptance({name: usual.get(name, _USUAL_CHANCE) for name in members})
    search = plan_search()
    return AdaptiveControl(Planner(budget, facts, costs.target, costs.drafters, acceptance, search))


def _usual_acceptance(speculative: SpeculativeConfig | None) -> dict[str, float]:
    """The chance of a first draft of each drafter, before any was seen."""
    given = () if speculative is None else speculative.drafters
    return {one.label: one.usual_acceptance for one in given}


def _load_limit(speculative: SpeculativeConfig | None) -> LoadLimit | None:
    if speculative is None:
        return None
    load = speculative.load
    if load.num_speculative_tokens_per_batch_size is not None:
        return LoadLimit(load.num_speculative_tokens_per_batch_size)
    if load.disable_by_batch_size is not None:
        return LoadLimit.off_from(load.disable_by_batch_size, _NO_LIMIT)
    return None


def _learner(
    drafters: Drafters,
    control: AdaptiveControl | None,
    journal: ControlJournal | None,
    keeper: CostKeeper | None,
) -> StepObserver:
    """Whoever learns from a step, one after another: they are given its plan, its outcome and its
    times."""
    if journal is None:
        return drafters.observe

    def observe(batch: Batch, verification: Verification, stats: StepStats) -> None:
        drafters.observe(batch, verification, stats)
        outcomes = draft_outcomes(batch, verification) if stats.num_drafts else ()
        journal.observe(batch.plan, outcomes, stats)
        if control is not None:
            control.observe(batch.plan, outcomes, stats)
        if keeper is not None:
            keeper.passed(stats.total_s)

    return observe


def _journal(mode: str, drafters: Drafters, control: AdaptiveControl | None) -> ControlJournal:
    """Writes down what control does, and can say why."""
    limits = {name: member.most for name, member in drafters.members.items()}
    why = by_settings(limits)
    if control is not None:
        looks_up = {name for name, one in drafters.members.items() if one.proposer.looks_up}
        why = by_plan(control.outlook, looks_up)
    floors = {name: member.floor for name, member in drafters.members.items()}
    there = {name: floor for name, floor in floors.items() if floor is not None}
    why = with_floors(why, there)
    if control is None:
        return ControlJournal(mode, limits, why)
    return ControlJournal(mode, limits, why, facts=control.facts, step_by_rows=control.step_by_rows)
