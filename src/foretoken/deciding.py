"""From settings to whoever decides how far each step drafts, and to those that learn from a step.

Three ways: as the settings say, as a few lengths were measured at each load, or adaptive control.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from foretoken.config import ResolvedConfig, SpeculativeConfig
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import LivePolicy, LoadLimit, RequestBudget
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.measured import MeasuredLimit
from foretoken.control.plan import DraftPlanner
from foretoken.control.report.journal import ControlJournal
from foretoken.control.report.reasons import by_plan, by_settings, by_trial, with_floors
from foretoken.kernels.threads import StepThreads
from foretoken.kv.pool import PagePool
from foretoken.proposers.choose.drafters import Drafters, draft_outcomes
from foretoken.proposers.costs import Timed, find_costs, seconds_for_timing
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
    measured: MeasuredLimit | None = None
    control: AdaptiveControl | None = None
    journal: ControlJournal | None = None
    """What was decided; None: nothing drafts."""

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        if self.control is not None:
            self.control.release(request_id)


def decide_how(parts: FoundParts) -> Decider:
    """As the settings of the engine want it."""
    drafters, user = parts.drafters, parts.config.user
    limits = {name: member.most for name, member in drafters.members.items()}
    live = LivePolicy()
    way = user.control if limits else "fixed"
    measured = MeasuredLimit(max(limits.values())) if way == "measured" else None
    limit = measured or _load_limit(user.speculative_config)
    budget = RequestBudget(limits, limit, live, limits_free=measured is None)
    control = _control(parts, budget) if way == "adaptive" else None
    journal = _journal(way, drafters, measured, control) if limits else None
    return Decider(
        plan=budget.plan if control is None else control.plan,
        observers=_learners(drafters, measured, control, journal),
        live=live,
        measured=measured,
        control=control,
        journal=journal,
    )


def _control(parts: FoundParts, budget: RequestBudget) -> AdaptiveControl:
    """Adaptive control, with what is known or can be timed of costs."""
    members = parts.drafters.members
    facts = [
        DrafterFacts(
            name=name,
            most=member.most,
            looks_up=member.proposer.looks_up,
            missing=member.proposer.num_missing,
            max_window=member.proposer.max_window,
            reads_features=name in parts.found and bool(parts.found[name].points),
        )
        for name, member in members.items()
    ]
    timed = Timed(
        config=parts.config,
        runner=parts.runner,
        members=members,
        pool=parts.pool,
        threads=parts.threads,
    )
    costs = find_costs(timed, most_seconds=seconds_for_timing())
    costs.target.expect_host_time()
    usual = _usual_acceptance(parts.config.user.speculative_config)
    acceptance = LearnedAcceptance({name: usual.get(name, _USUAL_CHANCE) for name in members})
    return AdaptiveControl(Planner(budget, facts, costs.target, costs.drafters, acceptance))


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


def _learners(
    drafters: Drafters,
    measured: MeasuredLimit | None,
    control: AdaptiveControl | None,
    journal: ControlJournal | None,
) -> tuple[StepObserver, ...]:
    """Whoever learns from a step: they are given its plan, its outcome and its times."""
    if journal is None:
        return (drafters.observe,)

    def observe(batch: Batch, verification: Verification, stats: StepStats) -> None:
        outcomes = draft_outcomes(batch, verification) if stats.num_drafts else ()
        journal.observe(batch.plan, outcomes, stats)
        if measured is not None:
            measured.observe(batch.plan, stats)
        if control is not None:
            control.observe(batch.plan, outcomes, stats)

    return drafters.observe, observe


def _journal(
    mode: str,
    drafters: Drafters,
    limit: MeasuredLimit | None,
    control: AdaptiveControl | None,
) -> ControlJournal:
    """Writes down what control does, and can say why."""
    limits = {name: member.most for name, member in drafters.members.items()}
    why = by_settings(limits) if limit is None else by_trial(limit)
    if control is not None:
        looks_up = {name for name, one in drafters.members.items() if one.proposer.looks_up}
        why = by_plan(control.outlook, looks_up)
    floors = {name: member.floor for name, member in drafters.members.items()}
    there = {name: floor for name, floor in floors.items() if floor is not None}
    why = with_floors(why, there)
    if control is None:
        return ControlJournal(mode, limits, why)
    return ControlJournal(mode, limits, why, facts=control.facts, step_by_rows=control.step_by_rows)
