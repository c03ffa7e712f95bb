"""What a plan says of the inside of drafts: which nodes a tree has, and by what drafters stop."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from foretoken.control.adaptive.allocation import Allocation, DraftOption
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.plan import DraftPrice, PlannedTree, StepForecast


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
