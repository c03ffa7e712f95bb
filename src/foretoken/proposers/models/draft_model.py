"""A smaller language model drafts, token by token, on the target's own page tables.

The draft's keys and values live in their own tensors but under the same pages as the target's,
so that allocation, preemption and prefix hits need no second book. It feeds every committed token
it has not seen in one pass (the newest one, after full acceptance two, after a pause all that were
missed, after a prefix hit only pages it never filled), then one token per further draft.

Source: Leviathan et al. 2023 and Chen et al. 2023; algorithm and pitfalls of the KV after partial
acceptance are in docs/losslessness.md.
"""

from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from foretoken.models.tensors import Draft, RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, Rolled, draft_chain, take_rolled
from foretoken.proposers.confidence import Confidence, Stopping
from foretoken.proposers.progress import DraftLimits, DraftProgress, feed_ahead
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sequence import Sequence


class LastLogits(Protocol):
    """A draft model over its own KV store; `foretoken.runtime.runner.Runner` is one."""

    @property
    def page_size(self) -> int:
        """Of the store."""

    def forward_last(self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]]) -> Tensor:
        """float32 logits over the target's ids after the last token of each span, [B, V]."""

    def roll_out(
        self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """Feed each span and draft several tokens after it, or None: one by one."""

    def logits_at(
        self, layouts: Seq[SpanLayout], token_ids: Seq[Seq[int]], rows: Seq[int]
    ) -> Tensor:
        """The same after some of the tokens, by index over all spans, [R, V]."""


class DraftModelProposer(Proposer):
    """Drafts with a second model that shares the target's vocabulary and page tables."""

    name = "draft_model"

    def __init__(
        self,
        runner: LastLogits,
        sampler: DraftSampler,
        generations: Seq[int],
        *,
        limits: DraftLimits,
        confidence: Confidence | None = None,
    ) -> None:
        """Draft with `runner`, choosing tokens with `sampler`.

        Args:
            runner: the draft model over its own KV store.
            sampler: turns draft logits into tokens and, under rejection, distributions.
            generations: the page pool's count of how often each page changed its contents.
            limits: of sequences and passes.
            confidence: when to stop before the budget; default: never.
        """
        self._confidence = confidence or Confidence()
        self.gain = self._confidence.gain
        self._runner = runner
        self._sampler = sampler
        self._progress = DraftProgress(generations, runner.page_size)
        self._limits = limits

    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = [i for i in context.wanted if self.fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        drafted = draft_chain(_ModelSteps(self, spans), self._sampler, spans, self._confidence)
        for span, tokens in zip(spans, drafted.ids, strict=True):
            self.remember(span.sequence, tokens)
        return drafted.spread(wanted, len(context.spans), self.name)

    def release(self, request_id: str) -> None:
        """Forget how far a request's draft KV reached; its pages keep their marks."""
        self._progress.release(request_id)
        self._sampler.release(request_id)

    def rewind(self, sequence: Sequence, num_kept: int) -> None:
        """Tokens of `sequence` from `num_kept` on are not those that were there before."""
        self._progress.rewind(sequence, num_kept)

    def remember(self, sequence: Sequence, tokens: list[int]) -> None:
        """Every committed token has draft KV now, and every drafted one but the last."""
        self._progress.record(sequence, sequence.num_tokens, tokens[:-1])

    def fits(self, span: Span) -> bool:
        """Whether the span's drafts would stay within the draft's context."""
        return span.sequence.num_tokens + span.draft_budget <= self._limits.max_model_len

    def catch_up(self, spans: list[Span]) -> Tensor:
        """Feed every committed token without draft KV; logits after the newest of each span."""
        starts, ends = self._stretch(spans)

        def feed(index: int, start: int, stop: int) -> None:
            self._feed([spans[index]], [start], [stop])

        feed_ahead(starts, ends, self._limits.max_num_batched_tokens, feed)
        return self._feed(spans, starts, ends)

    def missing(self, spans: list[Span]) -> tuple[list[SpanLayout], list[list[int]]]:
        """Where the committed tokens stand that the draft has not seen, and what they are."""
        return _stretches(spans, *self._stretch(spans))

    def _stretch(self, spans: list[Span]) -> tuple[list[int], list[int]]:
        """What each is to be fed before its first draft: first place and end."""
        ends = [span.sequence.num_tokens for span in spans]
        missing = [self._first_missing(span.sequence) for span in spans]
        return self._limits.starts(missing, ends), ends

    def _first_missing(self, sequence: Sequence) -> int:
        """The newest token is always fed again."""
        return min(self._progress.num_valid(sequence), sequence.num_tokens - 1)

    def _feed(self, spans: Seq[Span], starts: Seq[int], ends: Seq[int]) -> Tensor:
        return self._runner.forward_last(*_stretches(spans, starts, ends))


def _stretches(
    spans: Seq[Span], starts: Seq[int], ends: Seq[int]
) -> tuple[list[SpanLayout], list[list[int]]]:
    """Tokens [start, end) of each sequence."""
    layouts, ids = [], []
    for span, start, end in zip(spans, starts, ends, strict=True):
        sequence = span.sequence
        layouts.append(
            SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
        )
        ids.append(sequence.token_ids[start:end])
    return layouts, ids


class _ModelSteps(ChainSteps):
    """One pass over what the draft has not seen, then one token of each sequence a pass."""

    def __init__(self, proposer: DraftModelProposer, spans: list[Span]) -> None:
        self._proposer, self._spans = proposer, spans
        self._runner, self._sampler = proposer._runner, proposer._sampler

    def first(self) -> Tensor:
        return self._proposer.catch_up(self._spans)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        newest = [tokens[-1:] for tokens in drafted]
        return self._runner.forward_last(self._places(active, drafted), newest)

    def roll_out(
        self,
        active: list[int],
        drafted: list[list[int]],
        *,
        with_probs: bool,
        stopping: Stopping | None = None,
    ) -> Rolled | None:
        counts = [len(tokens) for tokens in drafted]
        steps = min(self._spans[i].draft_budget - n for i, n in zip(active, counts, strict=True))
        sequences = [self._spans[i].sequence for i in active]
        plan = self._sampler.plan(sequences, drafted, steps, with_probs=with_probs)
        if plan is None:
            return None
        if stopping is not None:
            plan = stopping.on(plan, active, len(drafted[0]))
        if drafted[0]:
            places, fed = self._places(active, drafted), [tokens[-1:] for tokens in drafted]
        else:
            places, fed = self._proposer.missing(self._spans)
        found = self._runner.roll_out(places, fed, plan)
        if found is None:
            return None
        return take_rolled(found, self._sampler, sequences, drafted)

    def _places(self, active: list[int], drafted: list[list[int]]) -> list[SpanLayout]:
        """Where the newest drafted token of each span stands."""
        sequences = [self._spans[i].sequence for i in active]
        return [
            SpanLayout(
                start=sequence.num_tokens + len(tokens) - 1,
                num_tokens=1,
                page_table=sequence.page_table,
            )
            for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
