"""A smaller language model drafts, token by token, on the target's own page tables.

The draft's keys and values live in their own tensors but under the same pages as the target's,
so that allocation, preemption and prefix hits need no second book. What this proposer keeps per
request is how far its own KV is valid: it feeds every committed token it has not seen in one
pass (the newest one, after full acceptance two, after a pause all that were missed, after a
prefix hit only pages it never filled), then one token per further draft.

Source: Leviathan et al. 2023 and Chen et al. 2023; algorithm and pitfalls of the KV after partial
acceptance are in docs/losslessness.md.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.runtime.batch import Span
from foretoken.runtime.sampler import DraftSampler
from foretoken.runtime.sequence import Sequence


class LastLogits(Protocol):
    """A draft model over its own KV store; `foretoken.runtime.runner.Runner` is one."""

    @property
    def page_size(self) -> int:
        """Of the store."""

    def forward_last(self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]]) -> Tensor:
        """float32 logits over the target's ids after the last token of each span, [B, V]."""

    def draft_greedily(
        self, layouts: Seq[SpanLayout], tokens: Seq[int], steps: int
    ) -> list[list[int]] | None:
        """Several best tokens after one token of each sequence, or None: one by one."""

    def logits_at(
        self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]], rows: Seq[int]
    ) -> Tensor:
        """The same after some of the tokens, by index over all spans, [R, V]."""


@dataclass(slots=True)
class _State:
    """How much of one sequence the draft has KV for."""

    num_preemptions: int
    """Of the sequence when this was written: a preempted sequence has new pages."""
    num_valid: int
    """Committed positions with valid draft KV."""
    drafted: list[int] = field(default_factory=list)
    """Draft tokens whose KV stands after those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confidence:
    """When drafting stops early.

    Decided on the distribution before its token is drawn, and a token that was drawn is always
    checked: what is dropped is never dropped for what it turned out to be.
    """

    threshold: float = 0.0
    """Stop where the best next token has less probability than this, filters and temperature
    aside; 0: never."""
    least: int = 0
    """Never stop before this many drafts."""

    def keeps(self, logits_BV: Tensor, counts: Seq[int]) -> list[int]:
        """Rows that draft on, given how many drafts each has: the first of them may be none."""
        if self.threshold == 0.0:
            return list(range(len(counts)))
        best_B = (logits_BV.amax(dim=-1) - logits_BV.logsumexp(dim=-1)).exp()
        sure = (best_B >= self.threshold).tolist()
        return [i for i, count in enumerate(counts) if sure[i] or count < self.least]


class DraftModelProposer(Proposer):
    """Drafts with a second model that shares the target's vocabulary and page tables."""

    name = "draft_model"

    def __init__(
        self,
        runner: LastLogits,
        sampler: DraftSampler,
        generations: Seq[int],
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        confidence: Confidence | None = None,
    ) -> None:
        """Draft with `runner`, choosing tokens with `sampler`.

        Args:
            runner: the draft model over its own KV store.
            sampler: turns draft logits into tokens and, under rejection, distributions.
            generations: the page pool's count of how often each page changed its contents.
            max_model_len: no drafts for sequences that would outgrow the draft's context.
            max_num_batched_tokens: most tokens of one draft forward.
            confidence: when to stop before the budget; default: never.
        """
        self._confidence = confidence or Confidence()
        self._runner = runner
        self._sampler = sampler
        self._generations = generations
        self._max_model_len = max_model_len
        self._max_tokens = max_num_batched_tokens
        self._filled: dict[int, int] = {}
        self._states: dict[str, _State] = {}

    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        ids: list[tuple[int, ...]] = [()] * len(context.spans)
        wanted = [i for i in context.wanted if self.fits(context.spans[i])]
        if not wanted:
            return Draft(ids=tuple(ids), drafter=self.name)
        spans = [context.spans[i] for i in wanted]
        drafted, probs_KV = self._draft(spans)
        for i, span, tokens in zip(wanted, spans, drafted, strict=True):
            ids[i] = tuple(tokens)
            self.remember(span.sequence, tokens)
        return Draft(ids=tuple(ids), probs_KV=probs_KV, drafter=self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached; its pages keep their marks."""
        self._states.pop(request_id, None)
        self._sampler.release(request_id)

    def rewind(self, sequence: Sequence, num_kept: int) -> None:
        """Tokens of `sequence` from `num_kept` on are not those that were there before."""
        state = self._states.get(sequence.request.request_id)
        if state is None or state.num_valid <= num_kept:
            return
        state.num_valid, state.drafted = num_kept, []
        for page in sequence.page_table[num_kept // self._runner.page_size :]:
            self._filled.pop(page, None)

    def fits(self, span: Span) -> bool:
        """Whether the span's drafts would stay within the draft's context."""
        return span.sequence.num_tokens + span.draft_budget <= self._max_model_len

    def _draft(self, spans: list[Span]) -> tuple[list[list[int]], Tensor | None]:
        """Draft every span up to its budget, in rounds of one token over the spans still open."""
        drafted: list[list[int]] = [[] for _ in spans]
        rows: list[Tensor] = []
        owners: list[int] = []
        draws = any(self._sampler.draws(span.sequence.request.params) for span in spans)
        logits_BV = self.catch_up(spans)
        active = list(range(len(spans)))
        while True:
            kept = self._confidence.keeps(logits_BV, [len(drafted[i]) for i in active])
            if len(kept) < len(active):
                logits_BV, active = logits_BV[kept], [active[i] for i in kept]
            if not active:
                break
            sequences = [spans[i].sequence for i in active]
            before = [drafted[i] for i in active]
            chosen = self._sampler.choose(logits_BV, sequences, before, with_probs=draws)
            for i, token in zip(active, chosen.ids, strict=True):
                drafted[i].append(token)
            if chosen.probs_BV is not None:
                rows.append(chosen.probs_BV)
                owners.extend(active)
            active = [i for i in active if len(drafted[i]) < spans[i].draft_budget]
            if not active or self._roll_out(spans, drafted, active):
                break
            logits_BV = self._extend([spans[i] for i in active], [drafted[i] for i in active])
        if not rows:
            return drafted, None
        order = sorted(range(len(owners)), key=owners.__getitem__)
        return drafted, torch.cat(rows)[order]

    def _roll_out(self, spans: list[Span], drafted: list[list[int]], active: list[int]) -> bool:
        """Draft all that is left in one call, if these drafts need nothing but best tokens."""
        lefts = {spans[i].draft_budget - len(drafted[i]) for i in active}
        sequences = [spans[i].sequence for i in active]
        if self._confidence.threshold or len(lefts) > 1 or not self._sampler.takes_best(sequences):
            return False
        places = _places([spans[i] for i in active], [drafted[i] for i in active])
        newest = [drafted[i][-1] for i in active]
        tokens = self._runner.draft_greedily(places, newest, lefts.pop())
        for i, more in zip(active, tokens or (), strict=bool(tokens)):
            drafted[i].extend(more)
        return tokens is not None

    def _extend(self, spans: list[Span], drafted: list[list[int]]) -> Tensor:
        """Logits after the newest drafted token of each span."""
        newest = [tokens[-1:] for tokens in drafted]
        return self._runner.forward_last(_places(spans, drafted), newest)

    def catch_up(self, spans: list[Span]) -> Tensor:
        """Feed every committed token without draft KV; logits after the newest of each span."""
        starts = [self._num_valid(span.sequence) for span in spans]
        while True:
            lengths = [s.sequence.num_tokens - at for s, at in zip(spans, starts, strict=True)]
            if sum(lengths) <= self._max_tokens:
                return self._feed(spans, starts, lengths)
            longest = max(range(len(spans)), key=lengths.__getitem__)
            chunk = min(lengths[longest] - 1, self._max_tokens)
            self._feed([spans[longest]], [starts[longest]], [chunk])
            starts[longest] += chunk

    def _feed(self, spans: list[Span], starts: list[int], lengths: list[int]) -> Tensor:
        layouts, ids = [], []
        for span, start, length in zip(spans, starts, lengths, strict=True):
            sequence = span.sequence
            layouts.append(
                SpanLayout(start=start, num_tokens=length, page_table=sequence.page_table)
            )
            ids.append(sequence.token_ids[start : start + length])
        return self._runner.forward_last(layouts, ids)

    def _num_valid(self, sequence: Sequence) -> int:
        """Committed positions whose draft KV can be used; the newest one is always fed again."""
        state = self._states.get(sequence.request.request_id)
        if state is None or state.num_preemptions != sequence.num_preemptions:
            valid = self._num_filled(sequence.page_table) * self._runner.page_size
        else:
            committed = sequence.token_ids[state.num_valid :]
            valid = state.num_valid
            for drafted, token in zip(state.drafted, committed, strict=False):
                if drafted != token:
                    break
                valid += 1
        return min(valid, sequence.num_tokens - 1)

    def _num_filled(self, page_table: list[int]) -> int:
        """Leading pages whose draft KV was written for their present contents."""
        for count, page in enumerate(page_table):
            if self._filled.get(page) != self._generations[page]:
                return count
        return len(page_table)

    def remember(self, sequence: Sequence, tokens: list[int]) -> None:
        """Every committed token has draft KV now, and every drafted one but the last."""
        request_id = sequence.request.request_id
        before = self._states.get(request_id)
        same = before is not None and before.num_preemptions == sequence.num_preemptions
        first = before.num_valid // self._runner.page_size if before is not None and same else 0
        for page in sequence.page_table[first : sequence.num_tokens // self._runner.page_size]:
            self._filled[page] = self._generations[page]
        self._states[request_id] = _State(
            num_preemptions=sequence.num_preemptions,
            num_valid=sequence.num_tokens,
            drafted=tokens[:-1],
        )


def _places(spans: list[Span], drafted: list[list[int]]) -> list[SpanLayout]:
    """Where the newest drafted token of each span stands."""
    return [
        SpanLayout(
            start=span.sequence.num_tokens + len(tokens) - 1,
            num_tokens=1,
            page_table=span.sequence.page_table,
        )
        for span, tokens in zip(spans, drafted, strict=True)
    ]
