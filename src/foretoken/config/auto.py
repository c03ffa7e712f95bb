"""`{"method": "auto"}`: the drafters that compete for a target where nobody names them.

Look-ups always, and of the drafters with weights that ship for the target the few that usually
bring most. Which of them drafts, and how far, is decided in each step by what was measured. Says
only who takes part; whether a server drafts where nobody says so is `default_speculation` in
`foretoken.engine.wiring`. Torch-free; reads the table of methods and no weights.
"""

from foretoken.checkpoint import installed
from foretoken.config.drafter import DrafterConfig
from foretoken.config.method_registry import DraftingMethod, PackagedDrafter, built_methods
from foretoken.config.published import packaged_drafter

AUTO = "auto"
"""The word for it in `method`, and on the command line."""
MOST_WITH_WEIGHTS = 3
"""Each of them takes memory, and time to be tried."""
_COSTED_DRAFTS = 4
"""Drafts that costs in the table of methods are stated for."""


def auto_drafters(target: str | None, max_drafts: int | None = None) -> tuple[DrafterConfig, ...]:
    """Who competes for `target`: look-ups first, then what ships for it, the best first.

    Args:
        target: the name of the target as the user wrote it.
        max_drafts: most draft tokens of any drafter; None: as usual for each method.

    Raises:
        ConfigError: `max_drafts` is no number of drafts.
    """
    found = [
        DrafterConfig.from_keys(
            {"method": method.name, "num_speculative_tokens": max_drafts or method.max_drafts}
        )
        for method in built_methods()
        if method.drafts_with == "text"
    ]
    for method, drafter in _shipped(target)[:MOST_WITH_WEIGHTS]:
        drafts = max_drafts or method.max_drafts
        keys: dict[str, object] = {"method": method.name, "model": drafter.model}
        keys["num_speculative_tokens"] = min(drafts, drafter.max_drafts or drafts)
        if drafter.in_parallel:
            # Its method's other name, where it has one: a second drafter of a method needs one.
            words = (word for word, sets in method.aliases.items() if sets.get("parallel_drafting"))
            keys |= {"parallel_drafting": True, "name": next(words, f"{method.name}_parallel")}
        if drafter.quantization is not None:
            keys["quantization"] = drafter.quantization
        found.append(DrafterConfig.from_keys(keys))
    return tuple(found)


def expected_gain(method: DraftingMethod, drafter: PackagedDrafter | None = None) -> float:
    """Tokens in the time of one plain step, with four drafts at a time; without drafts it is 1.

    Every draft counts as accepted with the same chance (Leviathan et al. 2022, section 3);
    what checking takes is left out, since it is the same for all. Without a `drafter`: as is usual
    for the method.
    """
    chance, cost, drafts = method.usual_acceptance, method.usual_cost, _COSTED_DRAFTS
    if drafter is not None:
        chance = chance if drafter.acceptance is None else drafter.acceptance
        cost = cost if drafter.cost is None else drafter.cost
        drafts = min(drafts, drafter.max_drafts or drafts)
    tokens: float = sum(chance**i for i in range(drafts + 1))
    return tokens / (1.0 + cost)


def _shipped(target: str | None) -> list[tuple[DraftingMethod, PackagedDrafter]]:
    """What is installed for `target`, the largest expected gain first."""
    there = installed()
    found = [
        (method, drafter)
        for method in built_methods()
        for drafter in method.packaged
        if drafter.target == target
        and drafter.model in there
        # A packaged drafter may be listed under two methods; its own files say which it is of.
        and packaged_drafter(method, target, in_parallel=bool(drafter.in_parallel)) == drafter.model
    ]
    return sorted(found, key=lambda one: expected_gain(*one), reverse=True)
