"""Puts a plan together: memory both ways, predictions, findings, commands.

The only module that knows all parts of planning.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import DRAFT_CHECKS, LOAD_CHECKS, MEMORY_CHECKS, PlanContext
from foretoken.lab.plan.memory_plan import (
    MemoryPlan,
    draft_load,
    overhead_bytes,
    plan_memory,
)
from foretoken.lab.plan.predict import (
    DraftSchedule,
    PlannedLatency,
    PlannedSpeed,
    draft_schedule,
    latency,
    predict,
)
from foretoken.lab.plan.ranking import (
    MethodOutlook,
    WorkloadOutlook,
    method_outlooks,
    with_method,
    workload_outlook,
)
from foretoken.lab.plan.ready_commands import ready_commands
from foretoken.lab.plan.setup import (
    WORKLOADS,
    PlanSettings,
    Setup,
    named_drafts,
    planned_methods,
    resolve_setup,
    usual_drafts,
)
from foretoken.lab.plan.speedup import MeasuredCost
from foretoken.lab.plan.verdict import CLEARLY, OF_SETTINGS, PlanVerdict, judge

CHECKS = (*MEMORY_CHECKS, *DRAFT_CHECKS, *LOAD_CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutlook:
    """One of several draft models that were named."""

    draft: str
    params: int
    requests: int
    problem: str
    prediction: PlannedSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class InsteadOutlook:
    """A method that can be had, would be used, and is expected to gain clearly more."""

    method: str
    verdict: PlanVerdict
    needs: str
    commands: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherReading:
    """What comes of a number given as the chance of each draft, if it is the rate of all."""

    chance: float
    rate: float
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
    workloads: tuple[WorkloadOutlook, ...]
    overhead_bytes: float
    plain: MemoryPlan
    speculating: MemoryPlan
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    instead: InsteadOutlook | None
    other_reading: OtherReading | None
    findings: tuple[Finding, ...]
    commands: dict[str, str]

    @property
    def refusal(self) -> Finding | None:
        """Why what was asked for does not start; None: nothing is known against it."""
        return next((finding for finding in self.findings if finding.level == "error"), None)


def build_plan(settings: PlanSettings, measured: MeasuredCost | None = None) -> SpeculationPlan:
    """Compute everything; what was `measured` at the load that decides counts instead of what is
    predicted there.

    Raises:
        ConfigError, ModelError: see `resolve_setup`; or several drafts for one measurement.
    """
    setups = [resolve_setup(replace(settings, draft=name)) for name in named_drafts(settings)]
    if measured is not None:
        if len(setups) > 1:
            raise ConfigError("plan.draft", settings.draft, "the one that was measured")
        own = settings.num_speculative_tokens or measured.k
        measured = replace(measured, method=setups[0].method)
        setups = [replace(setups[0], measured=measured, k=own)]
    if len(setups) > 1 and not all(setup.drafts_with == "model" for setup in setups):
        raise ConfigError("plan.draft", settings.draft, f"one name for method {setups[0].method}")
    contexts = [_context(setup) for setup in setups]
    drafts = tuple(_draft_outlook(one) for one in contexts if one.setup.draft is not None)
    context = contexts[_best(drafts, contexts[0].setup.usual)] if drafts else contexts[0]
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
        prediction=context.prediction,
        outlooks=context.outlooks,
        instead=_instead(context, findings, verdict),
        other_reading=_other_reading(context),
        findings=findings,
        commands=ready_commands(setup, context.schedule, speculates=verdict.speculates),
    )


def _context(setup: Setup) -> PlanContext:
    plain = plan_memory(setup, None)
    setup = _as_fits(setup, plain)
    prediction = predict(setup)
    return PlanContext(
        setup=setup,
        plain=plain,
        speculating=plan_memory(setup, draft_load(setup)),
        prediction=prediction,
        outlooks=method_outlooks(setup),
        schedule=draft_schedule(setup, prediction),
    )


def _as_fits(setup: Setup, plain: MemoryPlan) -> Setup:
    """With no more requests in flight than fit at once without drafts: the rest waits."""
    if not plain.fits:
        return setup
    usual, peak = (min(asked, plain.requests) for asked in (setup.usual, setup.peak))
    return replace(setup, usual=usual, peak=peak)


def _judged(
    context: PlanContext,
) -> tuple[tuple[Finding, ...], tuple[PlannedLatency, ...], PlanVerdict]:
    """What the checks find, times at the usual load and at the peak, and the verdict."""
    setup = context.setup
    findings = tuple(finding for check in CHECKS for finding in check(context))
    loads = map(context.prediction.at, (setup.usual, setup.peak))
    latencies = tuple(latency(setup, load, context.schedule.told(load.requests)) for load in loads)
    deciding = latencies[1 if setup.settings.slo == "throughput" else 0]
    return findings, latencies, judge(context, findings, deciding)


def _instead(
    context: PlanContext, findings: tuple[Finding, ...], verdict: PlanVerdict
) -> InsteadOutlook | None:
    usual = context.setup.usual
    k = context.schedule.told(usual) if verdict.speculates else 0
    now = context.prediction.at(usual).gain(k).middle
    others = (
        one for one in context.outlooks if one.available and one.method != context.setup.method
    )
    best = max(others, key=lambda one: one.prediction.at(usual).best, default=None)
    refused = next((one for one in findings if one.level == "error"), None)
    if context.setup.method == "none" or best is None:
        return None
    if refused is not None and refused.check in OF_SETTINGS:
        return None
    if best.prediction.at(usual).best < CLEARLY * now:
        return None
    other = _with_method(context, best)
    found = _judged(other)[2]
    if not found.speculates:
        return None
    return InsteadOutlook(
        method=best.method,
        verdict=found,
        needs=package_of(other.setup),
        commands=ready_commands(other.setup, other.schedule, speculates=True),
    )


def package_of(setup: Setup) -> str:
    """What has to be installed beside the engine for the method, in words; empty: nothing."""
    plan = setup.drafting.plan if setup.drafting else None
    package = plan.package(setup.settings.engine) if plan else ""
    return package and f"the package {package}, which {setup.settings.engine} imports for it"


def _other_reading(context: PlanContext) -> OtherReading | None:
    setup, settings = context.setup, context.setup.settings
    if not settings.acceptance or setup.own_measured is not None or setup.k < 2:
        return None
    other = replace(setup, settings=replace(settings, acceptance="", rate=settings.acceptance))
    prediction = predict(other)
    schedule = draft_schedule(other, prediction)
    read = replace(context, setup=other, prediction=prediction, schedule=schedule)
    return OtherReading(
        chance=prediction.acceptance.middle,
        rate=ConstantAcceptance(context.prediction.acceptance.middle).rate(setup.k),
        verdict=_judged(read)[2],
    )


def _with_method(context: PlanContext, other: MethodOutlook) -> PlanContext:
    method = planned_methods()[other.method]
    draft = context.setup.draft if method.drafts_with == "model" else None
    setup = replace(with_method(context.setup, other.method, usual_drafts(method)), draft=draft)
    return replace(
        context,
        setup=setup,
        speculating=plan_memory(setup, draft_load(setup)),
        prediction=other.prediction,
        schedule=draft_schedule(setup, other.prediction),
    )


def _draft_outlook(context: PlanContext) -> DraftOutlook:
    draft = context.setup.draft
    assert draft is not None
    errors = (
        finding.message
        for check in (*MEMORY_CHECKS, *DRAFT_CHECKS)
        for finding in check(context)
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
    order = [(not one.problem, one.prediction.at(requests).best) for one in drafts]
    return order.index(max(order))
