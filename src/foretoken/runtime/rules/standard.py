"""The rejection rule for chains: the same distribution, draft by draft.

Source: Leviathan et al. 2022 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import final

from torch import Tensor

from foretoken.ops.rejection import acceptable, leading, residual
from foretoken.runtime.rules.base import ChainRule, Check, draw_last, with_last
from foretoken.runtime.rules.drafts import FlatDrafts
from foretoken.runtime.rules.native_rules import complete, weigh


@final
class StandardRule(ChainRule):
    """Keeps a draft with probability min(1, p / q); else draws from max(p - q, 0)."""

    name = "standard"

    def decide(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Test draft after draft; the first that fails is replaced."""
        # The kernel decides nearly all checks. What it leaves open, as where there is none, is left
        # to the twin: both use the same uniforms, so it does not matter who decides.
        branches = weigh(self._sampler, logits_PV, checks, probs_KV, block=False)
        found = [None if branch is None else branch.new_ids for branch in branches]
        return complete(found, logits_PV, checks, partial(self._twin, probs_KV=probs_KV))

    def _twin(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Decide with PyTorch's operations."""
        processed_PV = self._sampler.process(logits_PV, [check.rows for check in checks])
        flat = FlatDrafts.of(self._sampler, processed_PV, checks, probs_KV)
        passed = acceptable(flat.target_KV, flat.drafted_KV, flat.ids_K, flat.uniforms_K)
        # Per check: how many drafts stay, the row of the last token, and which draft was rejected
        # (None: all stayed).
        kept, ends, failed = [], [], []
        first = 0
        for row, count in zip(flat.first_row_S, flat.lengths_S, strict=True):
            kept.append(leading(passed[first : first + count]))
            ends.append(row + kept[-1])
            failed.append(first + kept[-1] if kept[-1] < count else None)
            first += count
        # After a rejection the last token is drawn from max(p - q, 0). With drafts kept with
        # probability min(1, p / q), a token then has the distribution p, drafted or not. After the
        # last draft it is drawn from p itself.
        last_SV = processed_PV[ends]
        spans = [s for s, at in enumerate(failed) if at is not None]
        if spans:
            at = [at for at in failed if at is not None]
            drafted_SV = None if flat.drafted_KV is None else flat.drafted_KV[at]
            ids = [flat.ids_K[k] for k in at]
            last_SV[spans] = residual(last_SV[spans], flat.target_KV[at], drafted_SV, ids)
        # The rejected draft may have been drawn with the target's own noise of that position; what
        # replaces it must not depend on it, and gets other noise.
        recovered = [at is not None for at in failed]
        last = draw_last(self._sampler, last_SV, checks, kept, recovered)
        return with_last(checks, kept, last)
