"""The rules of the framework this project grew out of, and where each lives now.

Only ids and places; what a rule says, and why it was changed or rejected, is in docs/deciding.md. A
test walks the ids.
"""

from collections import defaultdict

from foretoken.lab.decide.policy import RULE_KINDS
from foretoken.lab.lint.checks import LAUNCH_CHECKS
from foretoken.lab.plan.planner import CHECKS

SECTIONS = {"D": 11, "K": 7, "T": 5, "M": 12, "Q": 5, "L": 9, "V": 8}
"""Choosing the draft, draft length, temperature, memory, quantization, load, verdict."""
REJECTED = ("D5", "D6", "Q3")
"""Without a check; docs/deciding.md has the reasons."""


def rule_ids() -> tuple[str, ...]:
    """Every id, in order."""
    return tuple(f"{letter}{n}" for letter, count in SECTIONS.items() for n in range(1, count + 1))


def rule_places() -> dict[str, tuple[str, ...]]:
    """Id -> where it is checked, as `plan: name`, `lint: name` or `policy: name`."""
    found: dict[str, list[str]] = defaultdict(list)
    for check in CHECKS:
        for rule in check.rules:
            found[rule].append(f"plan: {check.name}")
    for launch_check in LAUNCH_CHECKS:
        for rule in launch_check.rules:
            found[rule].append(f"lint: {launch_check.name}")
    for kind in RULE_KINDS.values():
        for rule in kind.ids:
            found[rule].append(f"policy: {kind.name}")
    return {rule: tuple(places) for rule, places in found.items()}
