"""Typical acceptance: a draft stays if the target finds it probable enough. LOSSY.

The output is plausible to the target but has not its distribution. Greedy requests are checked by
matching instead and stay exact.

Source: Cai et al. 2024 (Medusa, arXiv 2401.10774), section 2.3.1.
"""

from collections.abc import Sequence as Seq
from typing import final

from torch import Tensor

from foretoken.ops.rejection import leading, typical
from foretoken.runtime.rules.base import ChainRule, Check, draw_last, with_last
from foretoken.runtime.rules.drafts import FlatDrafts


@final
class TypicalRule(ChainRule):
    """Keeps leading drafts above an entropy-dependent threshold, then draws from the target."""

    name = "typical"

    def decide(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Test drafts against the target's distribution; what they were drawn from is not asked."""
        processed_PV = self._sampler.process(logits_PV, [check.rows for check in checks])
        flat = FlatDrafts.of(self._sampler, processed_PV, checks, None)
        passed = typical(
            flat.target_KV,
            flat.ids_K,
            threshold=self._settings.posterior_threshold,
            alpha=self._settings.posterior_alpha,
        )
        kept, ends, first = [], [], 0
        for row, count in zip(flat.first_row_S, flat.lengths_S, strict=True):
            kept.append(leading(passed[first : first + count]))
            ends.append(row + kept[-1])
            first += count
        own = [False] * len(checks)
        last = draw_last(self._sampler, processed_PV[ends], checks, kept, own)
        return with_last(checks, kept, last)
