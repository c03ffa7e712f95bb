"""When a chain drafter stops before its budget: where it is unsure of the next token.

Knows logits and counts only. Invariant: decided on the distribution before its token is drawn, and
a token that was drawn is always checked; what is dropped is never dropped for what it turned out
to be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """How sure of its next token a drafter must be to go on."""

    threshold: float = 0.0
    """Stop where the best next token has less probability than this, filters and temperature
    aside; 0: never."""
    least: int = 0
    """Never stop before this many drafts."""

    def keeps(self, logits_BV: Tensor, counts: Sequence[int]) -> list[int]:
        """Rows that draft on, given how many drafts each has: the first of them may be none."""
        if self.threshold == 0.0:
            return list(range(len(counts)))
        best_B = (logits_BV.amax(dim=-1) - logits_BV.logsumexp(dim=-1)).exp()
        sure = (best_B >= self.threshold).tolist()
        return [i for i, count in enumerate(counts) if sure[i] or count < self.least]
