"""Drafting one token after the other: the loop that all chain drafters share.

A drafter gives logits, this loop turns them into tokens: rounds of one token over the sequences
that still want some. Knows nothing of where logits come from. What is kept of a distribution is
what the token was really drawn from.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, RolledOut, Stopped
from foretoken.proposers.confidence import Confidence, Stopping
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence


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

    def roll_out(
        self,
        active: list[int],
        drafted: list[list[int]],
        *,
        with_probs: bool,
        stopping: Stopping | None = None,
    ) -> "Rolled | None":
        """Append drafts that can be had at once: those that one by one would give, or fewer; and no
        more than `stopping` allows.

        It is asked before `first`, with nothing drafted yet, and then before every `after`; what it
        drafts from the start on makes `first` needless. None: it appended none and changed nothing.
        """
        return None


@dataclass(frozen=True, slots=True)
class Rolled:
    """What was appended to the drafts of some spans at once, equally many to each that goes on."""

    probs_NV: Tensor | None = None
    """Distributions if they were asked for: one row for each further token."""
    owners: list[int] = field(default_factory=list)
    """Whose draft each of those rows is, by place among the spans that were asked for; the drafts
    of one in order."""
    logits_BV: Tensor | None = None
    """float32 logits after those drafts, where the next ones are left to be chosen; None: what was
    wanted by the span that wanted least was appended, or ended."""
    stopped: Stopped | None = None
    """Which of the spans ended, and why; None: none did."""


def take_rolled(
    found: RolledOut, sampler: DraftSampler, sequences: Seq[Sequence], drafted: Seq[list[int]]
) -> Rolled:
    """Append what a rollout gave to the drafts of its sequences."""
    rows: list[Rows] = []
    kept: list[int] = []
    owners: list[int] = []
    steps = max(len(more) for more in found.ids)
    for at in range(steps if found.logits_KV is not None else 0):
        for place, (sequence, tokens) in enumerate(zip(sequences, drafted, strict=True)):
            if at < len(found.ids[place]):
                before = (*tokens, *found.ids[place][:at])
                rows.append(Rows(sequence=sequence, drafts=before, first=len(before)))
                kept.append(at * len(sequences) + place)
                owners.append(place)
    for tokens, more in zip(drafted, found.ids, strict=True):
        tokens.extend(more)
    probs_NV = None
    if found.logits_KV is not None and rows:
        logits_KV = found.logits_KV
        logits_NV = logits_KV if len(kept) == logits_KV.shape[0] else logits_KV[kept]
        ids = [drafted[place][len(row.drafts)] for place, row in zip(owners, rows, strict=True)]
        probs_NV = sampler.distributions(logits_NV, rows, ids)
    return Rolled(probs_NV, owners, found.undecided_BV, found.stopped)


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


def draft_chain(
    steps: ChainSteps,
    sampler: DraftSampler,
    spans: list[Span],
    confidence: Confidence | None = None,
) -> ChainDraft:
    """Draft every span up to its budget, or to where `confidence` ends; default: never before."""
    stopping = None if confidence is None else confidence.begin(len(spans))
    drafted: list[list[int]] = [[] for _ in spans]
    rows: list[Tensor] = []
    owners: list[int] = []
    draws = any(sampler.draws(span.sequence.request.params) for span in spans)
    active = _open(list(range(len(spans))), spans, drafted)
    while active:
        before = [drafted[i] for i in active]
        rolled = steps.roll_out(active, before, with_probs=draws, stopping=stopping)
        if rolled is None:
            logits_BV = steps.after(active, before) if before[0] else steps.first()
        else:
            if rolled.probs_NV is not None:
                rows.append(rolled.probs_NV)
                owners.extend(active[place] for place in rolled.owners)
            if rolled.stopped is not None and stopping is not None:
                stopping.took(active, rolled.stopped)
                active = [active[row] for row in rolled.stopped.going]
            if rolled.logits_BV is None or not active:
                active = _open(active, spans, drafted)
                continue
            logits_BV = rolled.logits_BV
        if stopping is not None:
            kept = stopping.keeps(logits_BV, active, [len(drafted[i]) for i in active])
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
        if stopping is not None:
            active = stopping.goes_on(active, [len(drafted[i]) for i in active])
    if not rows:
        return ChainDraft(ids=drafted, probs_KV=None)
    probs_KV = rows[0] if len(rows) == 1 else torch.cat(rows)
    order = sorted(range(len(owners)), key=owners.__getitem__)
    if order != list(range(len(order))):
        probs_KV = probs_KV[order]
    return ChainDraft(ids=drafted, probs_KV=probs_KV)


def _open(active: list[int], spans: list[Span], drafted: list[list[int]]) -> list[int]:
    """Those that want more drafts."""
    return [i for i in active if len(drafted[i]) < spans[i].draft_budget]
