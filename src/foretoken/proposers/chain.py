"""Drafting one token after the other: the loop that all chain drafters share.

A drafter gives logits, this loop turns them into tokens: rounds of one token over the sequences
that still want some. Knows nothing of where logits come from. What is kept of a distribution is
what the token was really drawn from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.tensors import Draft
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler


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

    def keeps(self, logits_BV: Tensor, counts: Seq[int]) -> list[int]:
        """Which rows to draft from, given how many drafts each has; decided before any draw."""
        return list(range(len(counts)))

    def roll_out(
        self, active: list[int], drafted: list[list[int]], *, with_probs: bool
    ) -> Tensor | None:
        """Append drafts that can be had at once: those that one by one would give, or fewer.

        Returns:
            With `with_probs` their distributions, one row for each of `active` and each further
            token, token by token, [n * len(active), V]; None: none were appended.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainDraft:
    """Drafts of the spans, in order."""

    ids: list[list[int]]
    probs_KV: Tensor | None
    """float32 distributions of all drafts, span after span; None: one-hot."""

    def spread(self, places: Seq[int], count: int, drafter: str) -> Draft:
        """As the drafts of a step of `count` spans: these at `places`, none elsewhere."""
        ids: list[tuple[int, ...]] = [()] * count
        for place, tokens in zip(places, self.ids, strict=True):
            ids[place] = tuple(tokens)
        return Draft(ids=tuple(ids), probs_KV=self.probs_KV, drafter=drafter)


def draft_chain(steps: ChainSteps, sampler: DraftSampler, spans: list[Span]) -> ChainDraft:
    """Draft every span up to its budget."""
    drafted: list[list[int]] = [[] for _ in spans]
    rows: list[Tensor] = []
    owners: list[int] = []
    draws = any(sampler.draws(span.sequence.request.params) for span in spans)
    active = list(range(len(spans)))
    logits_BV = steps.first()
    while True:
        kept = steps.keeps(logits_BV, [len(drafted[i]) for i in active])
        if len(kept) < len(active):
            logits_BV, active = logits_BV[kept], [active[i] for i in kept]
        if not active:
            break
        sequences = [spans[i].sequence for i in active]
        before = [drafted[i] for i in active]
        chosen = sampler.choose(logits_BV, sequences, before, with_probs=draws)
        for i, token in zip(active, chosen.ids, strict=True):
            drafted[i].append(token)
        if chosen.probs_BV is not None:
            rows.append(chosen.probs_BV)
            owners.extend(active)
        active = _open(active, spans, drafted)
        if active:
            probs_NV = steps.roll_out(active, [drafted[i] for i in active], with_probs=draws)
            if probs_NV is not None:
                rows.append(probs_NV)
                owners.extend(active * (probs_NV.shape[0] // len(active)))
            active = _open(active, spans, drafted)
        if not active:
            break
        logits_BV = steps.after(active, [drafted[i] for i in active])
    if not rows:
        return ChainDraft(ids=drafted, probs_KV=None)
    order = sorted(range(len(owners)), key=owners.__getitem__)
    return ChainDraft(ids=drafted, probs_KV=torch.cat(rows)[order])


def _open(active: list[int], spans: list[Span], drafted: list[list[int]]) -> list[int]:
    """Those that want more drafts."""
    return [i for i in active if len(drafted[i]) < spans[i].draft_budget]
