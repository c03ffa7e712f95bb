"""Puts a plan together: memory both ways, predictions, choices, findings, commands.

The only module that knows all parts of planning.
"""

from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanContext
from foretoken.lab.plan.checks.fits import MEMORY_CHECKS
from foretoken.lab.plan.checks.pays import LOAD_CHECKS, draft_schedule
from foretoken.lab.plan.checks.suits import DRAFT_CHECKS
from foretoken.lab.plan.commands import ready_commands
from foretoken.lab.plan.memory_plan import (
    DraftLoad,
    MemoryPlan,
    NominalRow,
    draft_load,
    nominal_table,
    overhead_bytes,
    plan_memory,
)
from foretoken.lab.plan.predict import PlannedSpeed, predict
from foretoken.lab.plan.ranking import Choice, MethodOutlook, method_outlooks, rank_methods
from foretoken.lab.plan.setup import PlanSettings, Setup, resolve_setup

CHECKS = (*MEMORY_CHECKS, *DRAFT_CHECKS, *LOAD_CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationPlan:
    """The answer to one set of settings."""

    setup: Setup
    overhead_bytes: float
    """Per device."""
    plain: MemoryPlan
    speculating: MemoryPlan
    nominal: tuple[NominalRow, ...]
    """Empty without a draft model."""
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    choices: tuple[Choice, ...]
    schedule: tuple[tuple[int, int], ...]
    """(k, last number of requests in flight), 0 for no end."""
    findings: tuple[Finding, ...]
    commands: dict[str, str]


def build_plan(settings: PlanSettings) -> SpeculationPlan:
    """Compute everything.

    Raises:
        ConfigError, ModelError: see `resolve_setup`.
    """
    setup = resolve_setup(settings)
    load: DraftLoad = draft_load(setup)
    outlooks = method_outlooks(setup)
    context = PlanContext(
        setup=setup,
        plain=plan_memory(setup, None),
        speculating=plan_memory(setup, load),
        prediction=predict(setup),
        outlooks=outlooks,
        choices=rank_methods(setup, outlooks),
        nominal=_nominal(setup),
    )
    schedule = draft_schedule(context)
    return SpeculationPlan(
        setup=setup,
        overhead_bytes=overhead_bytes(setup),
        plain=context.plain,
        speculating=context.speculating,
        nominal=context.nominal,
        prediction=context.prediction,
        outlooks=outlooks,
        choices=context.choices,
        schedule=tuple(schedule),
        findings=tuple(finding for check in CHECKS for finding in check.run(context)),
        commands=ready_commands(setup, schedule),
    )


def _nominal(setup: Setup) -> tuple[NominalRow, ...]:
    if setup.draft is None:
        return ()
    memory_gb = setup.device.advertised_bytes * setup.tp / 1e9
    return nominal_table(
        setup.target, setup.draft, memory_gb=memory_gb, utilization=setup.utilization
    )
