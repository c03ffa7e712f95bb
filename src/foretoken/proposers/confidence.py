"""When a chain drafter stops before its budget: where it is unsure of the next token.

Invariant: decided on the distribution before its token is drawn, and a token that was drawn is
always checked; what is dropped is never dropped for what it turned out to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.models.tensors import RolloutPlan, StopRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure of its next token a drafter must be to go on."""

    threshold: float = 0.0
    """Stop where the best next token has less probability than this, filters and temperature
    aside; 0: never."""
    least: int = 0
    """Never stop before this many drafts."""

    @classmethod
    def of(cls, config: DrafterConfig) -> Self:
        """What a drafter's settings say."""
        stop = config.stop
        return cls(threshold=stop.draft_confidence_threshold, least=stop.min_speculative_tokens)

    def keeps(
        self, logits_BV: Tensor, count: int, sure: Sequence[float] | None = None
    ) -> list[int]:
        """Rows whose next token is to be drafted: before the first one, this may be none.

        Args:
            logits_BV: float32, of that token.
            count: the drafts that each has.
            sure: the chance of each row's draft, if something better is known than that of its best
                token.
        """
        if count < self.least:
            return list(range(len(logits_BV)))
        best_B = sure or best_chances(logits_BV)
        return [row for row, chance in enumerate(best_B) if chance >= self.threshold]

    def on(self, plan: RolloutPlan, count: int) -> RolloutPlan:
        """The rollout `plan` of sequences with `count` drafts each, made to end where this says."""
        rule = StopRule(least_sure=self.threshold, least=max(self.least - count, 0))
        return replace(plan, stop=rule)


def best_chances(logits_BV: Tensor) -> list[float]:
    """The probability of each row's best token."""
    chances: list[float] = (logits_BV.amax(dim=-1) - logits_BV.logsumexp(dim=-1)).exp().tolist()
    return chances
