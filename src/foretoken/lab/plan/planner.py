"""Puts a plan together: memory both ways, predictions, choices, findings, commands.

The only module that knows all parts of planning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanContext
from foretoken.lab.plan.checks.fits import MEMORY_CHECKS
from foretoken.lab.plan.checks.pays import LOAD_CHECKS
from foretoken.lab.plan.checks.suits import DRAFT_CHECKS
from foretoken.lab.plan.commands import ready_commands
from foretoken.lab.plan.latency import PlannedLatency, latency
from foretoken.lab.plan.memory_plan import (
    MemoryPlan,
    NominalRow,
    draft_load,
    nominal_table,
    overhead_bytes,
    plan_memory,
)
from foretoken.lab.plan.predict import PlannedSpeed, predict
from foretoken.lab.plan.ranking import (
    Choice,
    MethodOutlook,
    WorkloadOutlook,
    method_outlooks,
    rank_methods,
    workload_outlook,
)
from foretoken.lab.plan.schedule import DraftSchedule, draft_schedule
from foretoken.lab.plan.setup import (
    WORKLOADS,
    PlanSettings,
    Setup,
    named_drafts,
    planned_methods,
    resolve_setup,
    usual_drafts,
)
from foretoken.lab.plan.verdict import CLEARLY, PlanVerdict, judge

CHECKS = (*MEMORY_CHECKS, *DRAFT_CHECKS, *LOAD_CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutlook:
    """One of several draft models that were named."""

    draft: str
    params: int
    requests: int
    """Typical requests that fit at once beside it."""
    problem: str
    """Why it cannot be used; empty where it can."""
    prediction: PlannedSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class InsteadOutlook:
    """A method that needs nothing more, would be used, and is expected to gain clearly more."""

    method: str
    verdict: PlanVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The answer to one set of settings."""

    setup: Setup
    """With the best of the drafts that were named."""
    verdict: PlanVerdict
    schedule: DraftSchedule
    latencies: tuple[PlannedLatency, ...]
    """At the usual load and at the peak, with the drafts that the engine can be told."""
    drafts: tuple[DraftOutlook, ...]
    """Every draft that was named, in that order."""
    workloads: tuple[WorkloadOutlook, ...]
    overhead_bytes: float
    """Per device."""
    plain: MemoryPlan
    speculating: MemoryPlan
    nominal: tuple[NominalRow, ...]
    """Empty without a draft model."""
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    choices: tuple[Choice, ...]
    instead: InsteadOutlook | None
    """None: nothing to be had would do better."""
    findings: tuple[Finding, ...]
    commands: dict[str, str]
    """By engine; plain ones where the verdict is against speculating."""

    @property
    def refusal(self) -> Finding | None:
        """Why what was asked for does not start; None: nothing is known against it."""
        return next((finding for finding in self.findings if finding.level == "error"), None)


def build_plan(settings: PlanSettings) -> SpeculationPlan:
    """Compute everything.

    Raises:
        ConfigError, ModelError: see `resolve_setup`.
    """
    setups = [resolve_setup(replace(settings, draft=name)) for name in named_drafts(settings)]
    if len(setups) > 1 and not all(setup.drafts_with == "model" for setup in setups):
        raise ConfigError("plan.draft", settings.draft, f"one name for method {setups[0].method}")
    contexts = [_context(setup) for setup in setups]
    drafts = tuple(_draft_outlook(one) for one in contexts if one.setup.draft is not None)
    context = contexts[_best(drafts, settings.concurrency)] if drafts else contexts[0]
    setup = context.setup
    findings, latencies, verdict = _judged(context)
    return SpeculationPlan(
        setup=setup,
        verdict=verdict,
        schedule=context.schedule,
        latencies=latencies,
        drafts=drafts,
        workloads=tuple(workload_outlook(setup, workload) for workload in WORKLOADS),
        overhead_bytes=overhead_bytes(setup),
        plain=context.plain,
        speculating=context.speculating,
        nominal=context.nominal,
        prediction=context.prediction,
        outlooks=context.outlooks,
        choices=context.choices,
        instead=_instead(context, verdict),
        findings=findings,
        commands=ready_commands(setup, context.schedule, speculates=verdict.speculates),
    )


def _context(setup: Setup) -> PlanContext:
    outlooks = method_outlooks(setup)
    prediction = predict(setup)
    return PlanContext(
        setup=setup,
        plain=plan_memory(setup, None),
        speculating=plan_memory(setup, draft_load(setup)),
        prediction=prediction,
        outlooks=outlooks,
        choices=rank_methods(setup, outlooks),
        nominal=_nominal(setup),
        schedule=draft_schedule(setup, prediction),
    )


def _judged(
    context: PlanContext,
) -> tuple[tuple[Finding, ...], tuple[PlannedLatency, ...], PlanVerdict]:
    """What the checks find, times at the usual load and at the peak, and the verdict."""
    setup, settings = context.setup, context.setup.settings
    findings = tuple(finding for check in CHECKS for finding in check.run(context))
    loads = map(context.prediction.at, (settings.concurrency, settings.peak_concurrency))
    latencies = tuple(latency(setup, load, context.schedule.told(load.requests)) for load in loads)
    deciding = latencies[1 if settings.slo == "throughput" else 0]
    return findings, latencies, judge(context, findings, deciding)


def _instead(context: PlanContext, verdict: PlanVerdict) -> InsteadOutlook | None:
    """The best of the methods that need nothing new, where it does clearly better."""
    usual = context.setup.settings.concurrency
    k = context.schedule.told(usual) if verdict.speculates else 0
    now = context.prediction.at(usual).gain(k).middle
    others = (
        one for one in context.outlooks if one.available and one.method != context.setup.method
    )
    best = max(others, key=lambda one: one.prediction.at(usual).best, default=None)
    if context.setup.method == "none" or best is None:
        return None
    if best.prediction.at(usual).best < CLEARLY * now:
        return None
    found = _judged(_with_method(context, best))[2]
    return InsteadOutlook(method=best.method, verdict=found) if found.speculates else None


def _with_method(context: PlanContext, other: MethodOutlook) -> PlanContext:
    """The same question about another method."""
    method = planned_methods()[other.method]
    draft = context.setup.draft if method.drafts_with == "model" else None
    setup = replace(context.setup, method=other.method, k=usual_drafts(method), draft=draft)
    return replace(
        context,
        setup=setup,
        speculating=plan_memory(setup, draft_load(setup)),
        prediction=other.prediction,
        schedule=draft_schedule(setup, other.prediction),
        nominal=_nominal(setup),
    )


def _draft_outlook(context: PlanContext) -> DraftOutlook:
    draft = context.setup.draft
    assert draft is not None
    errors = (
        finding.message
        for check in (*MEMORY_CHECKS, *DRAFT_CHECKS)
        for finding in check.run(context)
        if finding.level == "error"
    )
    return DraftOutlook(
        draft=draft.name,
        params=draft.params,
        requests=context.speculating.requests,
        problem=next(errors, ""),
        prediction=context.prediction,
    )


def _best(drafts: Sequence[DraftOutlook], requests: int) -> int:
    """The draft that gains most at a load, among those that can be used."""
    order = [(not one.problem, one.prediction.at(requests).best) for one in drafts]
    return order.index(max(order))


def _nominal(setup: Setup) -> tuple[NominalRow, ...]:
    if setup.draft is None:
        return ()
    memory_gb = setup.device.advertised_bytes * setup.devices / 1e9
    return nominal_table(
        setup.target, setup.draft, memory_gb=memory_gb, utilization=setup.utilization
    )
