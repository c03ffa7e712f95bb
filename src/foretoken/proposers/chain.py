"""Drafting one token after the other: the loop that all chain drafters share.

A drafter gives logits, this loop turns them into tokens: rounds of one token over the sequences
that still want some. Knows nothing of where logits come from. What is kept of a distribution is
what the token was really drawn from.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.runtime.batch import Span
from foretoken.runtime.sampler import DraftSampler


class ChainSteps(ABC):
    """What makes the logits of one call of `draft_chain`."""

    @abstractmethod
    def first(self) -> Tensor:
        """float32 logits after the newest token of every span, [B, V]."""

    @abstractmethod
    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """float32 logits after the drafts so far of the spans `active`, [len(active), V].

        Args:
            active: indices of spans, ascending, each among those of the call before.
            drafted: the drafts so far of each of them.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDraft:
    """Drafts of the spans, in order."""

    ids: list[list[int]]
    probs_KV: Tensor | None
    """float32 distributions of all drafts, span after span; None: one-hot."""


def draft_chain(steps: ChainSteps, sampler: DraftSampler, spans: list[Span]) -> ChainDraft:
    """Draft every span up to its budget."""
    drafted: list[list[int]] = [[] for _ in spans]
    rows: list[Tensor] = []
    owners: list[int] = []
    draws = any(sampler.draws(span.sequence.request.params) for span in spans)
    active = list(range(len(spans)))
    logits_BV = steps.first()
    while True:
        sequences = [spans[i].sequence for i in active]
        before = [drafted[i] for i in active]
        chosen = sampler.choose(logits_BV, sequences, before, with_probs=draws)
        for i, token in zip(active, chosen.ids, strict=True):
            drafted[i].append(token)
        if chosen.probs_BV is not None:
            rows.append(chosen.probs_BV)
            owners.extend(active)
        active = [i for i in active if len(drafted[i]) < spans[i].draft_budget]
        if not active:
            break
        logits_BV = steps.after(active, [drafted[i] for i in active])
    if not rows:
        return ChainDraft(ids=drafted, probs_KV=None)
    order = sorted(range(len(owners)), key=owners.__getitem__)
    return ChainDraft(ids=drafted, probs_KV=torch.cat(rows)[order])
