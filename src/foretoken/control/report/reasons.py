"""Why a drafter drafts or rests now, by whatever decides: one function for each way of deciding.

Each gives a function that is asked with a drafter, whether it drafts, and the plan of the last
step, and that answers with a sentence of `control/report/explain.py`.
"""

from collections.abc import Callable, Collection, Mapping

from foretoken.control.floor import AcceptanceFloor
from foretoken.control.plan import DraftPlan
from foretoken.control.report.explain import (
    Outlook,
    why_below_floor,
    why_by_load,
    why_drafting,
    why_fixed,
    why_looking_up,
    why_passed_over,
    why_resting,
)

Why = Callable[[str, bool, DraftPlan], str]
"""Why a drafter (by name) drafts, True, or does not, False, around the step of this plan."""


def by_settings(drafters: Mapping[str, int]) -> Why:
    """Nothing decides but the settings: every drafter drafts as far as they say."""

    def why(drafter: str, drafts: bool, plan: DraftPlan) -> str:
        if plan.limit is not None:
            return why_by_load(min(plan.limit, drafters[drafter]), plan.load.num_running)
        if drafts or len(drafters) == 1:
            return why_fixed(drafters[drafter])
        return why_passed_over()

    return why


def by_plan(outlook: Callable[[str], Outlook | None], looks_up: Collection[str]) -> Why:
    """What the plan expects of a drafter, or what its best length would have come to.

    Args:
        outlook: the best length of a drafter that does not draft, where control knows it.
        looks_up: drafters that find their drafts in text.
    """

    def why(drafter: str, drafts: bool, plan: DraftPlan) -> str:
        forecast, count = plan.forecast, plan.load.num_decoding
        if drafter in looks_up:
            rows = 0 if forecast is None else forecast.free_rows
            return why_looking_up(drafter, rows, drafts=drafts)
        pairs = zip(plan.lengths, plan.drafters, strict=True)
        lengths = [length for length, name in pairs if name == drafter and length]
        if not drafts or not lengths or forecast is None:
            others = next((name for name in plan.drafters if name not in ("", drafter)), "")
            return why_resting(count, outlook(drafter), others)
        mean = sum(lengths) / len(lengths)
        expected = Outlook(mean, forecast.tokens / count, forecast.seconds / forecast.plain_s)
        return why_drafting(drafter, expected, len(lengths), count)

    return why


def with_floors(why: Why, floors: Mapping[str, AcceptanceFloor]) -> Why:
    """What a drafter's `min_acceptance` has to say comes first."""

    def said(drafter: str, drafts: bool, plan: DraftPlan) -> str:
        floor = floors.get(drafter)
        if floor is not None and floor.rests:
            return why_below_floor(floor.acceptance, floor.least)
        return why(drafter, drafts, plan)

    return said
