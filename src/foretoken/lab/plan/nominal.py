"""Memory by size times bytes, as it is often counted on paper, and what that count leaves out.

The count multiplies a rounded number of weights by the bytes per weight, subtracts the sum from the
memory, and calls the rest free for keys and values. The server takes the utilisation off first, and
a draft has keys and values of its own. Decimal gigabytes.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from foretoken.lab.plan.bits import QUANTIZATIONS
from foretoken.lab.plan.sizes import PlanModel

ROWS = (
    ("int8", "none"),
    ("int8", "bf16"),
    ("bf16", "bf16"),
    ("int8", "int8"),
    ("int4", "bf16"),
    ("int4", "int4"),
)
"""Quantizations of target and draft, one pair per row; `none`: without a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NominalRow:
    """One line of the table. Gigabytes of 1e9 bytes; tokens of keys and values."""

    target_quantization: str
    draft_quantization: str
    weights_gb: float
    """Rounded billions of weights times nominal bytes."""
    left_gb: float
    """What the count says is left: memory less weights."""
    budget_gb: float
    """What may be used of it: memory times utilisation, less weights."""
    tokens_plain: int
    """Tokens in the budget if there were no draft."""
    tokens_one_for_one: int
    """Tokens if a draft cost only its weights."""
    tokens: int
    """Tokens with the draft's own keys and values."""

    @property
    def differs(self) -> str:
        """What the count leaves out, in words."""
        if self.budget_gb < 0 <= self.left_gb:
            return "by size times bytes it fits; at this utilisation it does not load"
        if self.budget_gb < 0:
            return "does not load either way"
        if self.draft_quantization == "none":
            return f"{self.left_gb - self.budget_gb:.0f} GB of what is left may not be used"
        lost = 1 - self.tokens / self.tokens_plain if self.tokens_plain else 1.0
        counted = 1 - self.tokens_one_for_one / self.tokens_plain if self.tokens_plain else 1.0
        return (
            f"{self.left_gb - self.budget_gb:.0f} GB of what is left may not be used; "
            f"the draft costs {lost:.0%} of the tokens, not {counted:.0%}"
        )


def nominal_billions(model: PlanModel) -> float:
    """The size in the model's name, such as 70 for `Llama-3.1-70B`; else its weights, rounded."""
    sizes = re.findall(r"(?<![0-9.a-z])(\d+(?:\.\d+)?)b(?![a-z0-9])", model.name.lower())
    return float(sizes[-1]) if sizes else round(model.params / 1e9, 1)


def nominal_table(
    target: PlanModel,
    draft: PlanModel,
    *,
    memory_gb: float,
    utilization: float = 0.9,
    rows: Iterable[tuple[str, str]] = ROWS,
) -> tuple[NominalRow, ...]:
    """The table for a target and a draft on devices of `memory_gb` in total."""
    per_token = 2e-9 * (target.kv_elements + target.window_elements)
    both = per_token + 2e-9 * (draft.kv_elements + draft.window_elements)
    found = []
    for own, other in rows:
        target_gb = nominal_billions(target) * QUANTIZATIONS[own].nominal_bytes
        alone = other == "none"
        draft_gb = 0.0 if alone else nominal_billions(draft) * QUANTIZATIONS[other].nominal_bytes
        budget = memory_gb * utilization - target_gb - draft_gb
        found.append(
            NominalRow(
                target_quantization=own,
                draft_quantization=other,
                weights_gb=target_gb + draft_gb,
                left_gb=memory_gb - target_gb - draft_gb,
                budget_gb=budget,
                tokens_plain=max(0, int((budget + draft_gb) / per_token)),
                tokens_one_for_one=max(0, int(budget / per_token)),
                tokens=max(0, int(budget / (per_token if alone else both))),
            )
        )
    return tuple(found)
