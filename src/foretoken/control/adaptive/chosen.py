"""What was chosen for a step: what each request does by it, and what it says of the inside of
drafts, which is the nodes of trees and what drafters stop by. Knows no models."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from foretoken.control.adaptive.allocation import Allocation, DraftOption
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.exploring import Trial
from foretoken.control.adaptive.luck import chances
from foretoken.control.adaptive.made import PlannedDrafts
from foretoken.control.adaptive.planning import FirstReading
from foretoken.control.plan import DraftPlan, DraftPrice, PlannedTree, StepForecast


class Chosen(NamedTuple):
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
    lasts: int
    """Steps of what is there to find something out; 0: it is not."""


def held_by(ids: Seq[str], plan: DraftPlan, chosen: Chosen) -> dict[str, PlannedDrafts]:
    """What each request does from now on; those that have to be read first, as soon as they are."""
    count, wanted = len(ids), chosen.wanted
    surplus_N, trees_N = plan.surplus or (0.0,) * count, plan.trees or (None,) * count
    luck_N = chances(chosen.found, chosen.options)
    each = map(PlannedDrafts, plan.lengths, plan.drafters, plan.drafts, surplus_N, trees_N, luck_N)
    held = dict(zip(ids, each, strict=True))
    wanted_trees = planned_trees(wanted, chosen.options) or (None,) * count
    for place, (name, left) in chosen.reading.waiting.items():
        if left:
            length = int(wanted.drafts_N[place])
            most = max(length, plan.drafts[place])
            held[ids[place]] = PlannedDrafts(length, name, most, 0.0, wanted_trees[place])
    return held


def prices(
    found: Allocation,
    options: Seq[DraftOption],
    drafters: Mapping[str, DrafterState],
    forecast: StepForecast,
) -> dict[str, DraftPrice]:
    """What those drafters of the plan stop by that look at their own chances."""
    values = {}
    for chosen in set(found.drafter_N.tolist()) - {-1}:
        option, users = options[chosen], int((found.drafter_N == chosen).sum())
        drafter = drafters[option.name]
        if not drafter.facts.ends_by_price or len(option.depth_s) < 3:
            continue
        # The second draft of a chain comes after the first; so does the second node of a tree.
        first, second = option.survival_NK[:, :2].sum(axis=0).tolist()
        values[option.name] = drafter.price(
            token_s=1.0 / forecast.price,
            row_s=forecast.row_s,
            usual=second / first,
            pass_s=float(option.depth_s[2] - option.depth_s[1]) + option.slot_s * users,
        )
    return values


def expected(
    found: Allocation, options: Seq[DraftOption], drafters: Mapping[str, DrafterState]
) -> dict[str, float]:
    """Drafts that the plan's drafter is expected to have accepted in a step, by its chances alone;
    nothing where there are several."""
    chosen = set(found.drafter_N.tolist()) - {-1}
    if len(chosen) != 1:
        return {}
    name = options[chosen.pop()].name
    return {name: (found.tokens - len(found.drafts_N)) / drafters[name].kept}


def planned_trees(found: Allocation, options: Seq[DraftOption]) -> tuple[PlannedTree | None, ...]:
    """Which nodes the trees of each sequence have, the best first; nothing where all are chains."""
    trees = [option.levels_K is not None for option in options]
    if found.slots is None or not any(trees):
        return ()
    count = len(found.drafts_N)
    nodes: list[list[int]] = [[] for _ in range(count)]
    for slot in found.slots.tolist():
        nodes[slot % count].append(slot // count)
    return tuple(
        PlannedTree(tuple(own), found.depth) if own and trees[drafter] else None
        for own, drafter in zip(nodes, found.drafter_N.tolist(), strict=True)
    )
