"""Checks of a plan: does the draft suit, does all of it fit, does the traffic pay for it.

Here is what all of them look at, and how a check is declared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.plan.memory_plan import MemoryPlan, NominalRow
from foretoken.lab.plan.predict import PlannedSpeed
from foretoken.lab.plan.ranking import Choice, MethodOutlook
from foretoken.lab.plan.schedule import DraftSchedule
from foretoken.lab.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanContext:
    """Everything computed before the checks run."""

    setup: Setup
    plain: MemoryPlan
    speculating: MemoryPlan
    prediction: PlannedSpeed
    outlooks: tuple[MethodOutlook, ...]
    choices: tuple[Choice, ...]
    nominal: tuple[NominalRow, ...]
    schedule: DraftSchedule


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A named check."""

    name: str
    run: Callable[[PlanContext], Iterator[Finding]]
