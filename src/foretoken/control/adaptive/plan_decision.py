"""What was chosen for a step, and what each request does by it. Knows no models."""

from collections.abc import Sequence as Seq
from typing import NamedTuple

from foretoken.control.adaptive.active_plan import PlannedDrafts
from foretoken.control.adaptive.allocation import Allocation, DraftOption
from foretoken.control.adaptive.exploring import Trial
from foretoken.control.adaptive.plan_assembly import FirstReading
from foretoken.control.plan import DraftPlan


class PlanDecision(NamedTuple):
    """What a step does, and why."""

    found: Allocation
    options: list[DraftOption]
    """What the drafters of `found` are counted by."""
    weighed: list[DraftOption]
    """What all drafters could do."""
    reading: FirstReading
    wanted: Allocation
    """As `found`, if nobody had to be read first."""
    trial: Trial | None
    waking: set[str]
    """Drafters at rest that are wanted again."""


def held_by(ids: Seq[str], plan: DraftPlan, decision: PlanDecision) -> dict[str, PlannedDrafts]:
    """What each request does from now on; those that have to be read first, as soon as they are."""
    count, wanted = len(ids), decision.wanted
    surplus_N = plan.surplus or (0.0,) * count
    each = map(PlannedDrafts, plan.lengths, plan.drafters, plan.budgets, surplus_N)
    held = dict(zip(ids, each, strict=True))
    for place, (name, left) in decision.reading.waiting.items():
        if left:
            length = int(wanted.lengths_N[place])
            budget = max(length, plan.budgets[place])
            held[ids[place]] = PlannedDrafts(length, name, budget, 0.0)
    return held
