"""Block verification: the rejection rule for whole chains, never worse than draft by draft.

Source: Sun et al. 2024 (arXiv 2403.10444), algorithm 2.
"""

from collections.abc import Sequence as Seq
from functools import partial
from typing import final

from torch import Tensor

from foretoken.ops.block_verification import BlockTests, keep_blocks
from foretoken.ops.rejection import residual
from foretoken.runtime.rules.base import ChainRule, Check, draw_last, with_last
from foretoken.runtime.rules.drafts import FlatDrafts
from foretoken.runtime.rules.native_rules import complete, weigh
from foretoken.runtime.sampler import Sampler


@final
class BlockRule(ChainRule):
    """Keeps the longest prefix of drafts that passes a joint test."""

    def __init__(self, sampler: Sampler, name: str) -> None:
        """Process logits with `sampler`; on a chain, `traversal` is the same rule."""
        super().__init__(sampler)
        self.name = name

    def decide(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Test the chain as a whole: a draft may stay for the sake of those after it."""
        branches = weigh(self._sampler, logits_PV, checks, probs_KV, block=True)
        found = [None if branch is None else branch.new_ids for branch in branches]
        return complete(found, logits_PV, checks, partial(self._twin, probs_KV=probs_KV))

    def _twin(
        self, logits_PV: Tensor, checks: Seq[Check], probs_KV: Tensor | None
    ) -> list[tuple[int, ...]]:
        """Decide with PyTorch's operations."""
        processed_PV = self._sampler.process(logits_PV, [check.rows for check in checks])
        # The joint test looks at the uniforms of drafts behind the one that it rejects. The next
        # verification must not see them again, hence fresh ones each time.
        flat = FlatDrafts.of(self._sampler, processed_PV, checks, probs_KV, fresh=True)
        blocks = keep_blocks(
            BlockTests(
                ids_K=flat.ids_K,
                uniforms_K=flat.uniforms_K,
                lengths_S=flat.lengths_S,
                target_KV=flat.target_KV,
                drafted_KV=flat.drafted_KV,
            )
        )
        ends = [row + count for row, count in zip(flat.first_row_S, blocks.kept_S, strict=True)]
        last_SV = processed_PV[ends]
        spans = [s for s, at in enumerate(blocks.failed_S) if at is not None]
        if spans:
            at = [at for at in blocks.failed_S if at is not None]
            drafted_SV = None if flat.drafted_KV is None else flat.drafted_KV[at]
            last_SV[spans] = residual(
                last_SV[spans],
                flat.target_KV[at],
                drafted_SV,
                [flat.ids_K[k] for k in at],
                weights_S=[blocks.weight_S[s] for s in spans],
            )
        recovered = [at is not None for at in blocks.failed_S]
        last = draw_last(self._sampler, last_SV, checks, blocks.kept_S, recovered)
        return with_last(checks, blocks.kept_S, last)
