"""The drafts of several checks laid end to end, as the rules that weigh probabilities want them.

Shape letters: K drafts of all checks, S checks, P their rows of logits, V vocabulary.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from foretoken.ops.noise import Stream, row_key, uniform
from foretoken.runtime.rules.base import Check
from foretoken.runtime.sampler import Sampler


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatDrafts:
    """Draft after draft, check after check."""

    ids_K: list[int]
    uniforms_K: list[float]
    """One per draft, from its request's key."""
    rows_K: list[int]
    """Which of the checks' P rows each draft is tested at."""
    first_row_S: list[int]
    """Which of the P rows is each check's first."""
    lengths_S: list[int]
    """Drafts of each check."""
    target_KV: Tensor
    """float32 processed target distribution at each draft."""
    drafted_KV: Tensor | None
    """float32 distribution each was drawn from; None: one-hot."""

    @classmethod
    def of(
        cls,
        sampler: Sampler,
        logits_PV: Tensor,
        checks: Seq[Check],
        probs_KV: Tensor | None,
        *,
        fresh: bool = False,
    ) -> Self:
        """Lay out the drafts of `checks`, whose processed logits are `logits_PV`.

        `fresh` draws new uniforms for a position at every verification, which a rule needs that
        looks at the uniforms of drafts behind the first one it rejects.
        """
        ids, uniforms, rows, drafted_rows, first_rows = [], [], [], [], []
        row = 0
        for check in checks:
            key = sampler.profile(check.rows.sequence.request).key
            start = check.rows.position
            anchor = check.rows.sequence.num_tokens if fresh else 0
            for i, token in enumerate(check.drafts):
                ids.append(token)
                uniforms.append(uniform(row_key(key, start + i, Stream.ACCEPT, anchor)))
                rows.append(row + i)
                drafted_rows.append(check.drafted_row + i)
            first_rows.append(row)
            row += check.rows.num_rows
        return cls(
            ids_K=ids,
            uniforms_K=uniforms,
            rows_K=rows,
            first_row_S=first_rows,
            lengths_S=[len(check.drafts) for check in checks],
            target_KV=logits_PV[torch.tensor(rows, device=logits_PV.device)].softmax(dim=-1),
            drafted_KV=None if probs_KV is None else probs_KV[drafted_rows],
        )
