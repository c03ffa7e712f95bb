"""A smaller language model drafts, token by token, on the target's own page tables.

The draft's keys and values live in their own tensors but under the same pages as the target's,
so that allocation, preemption and prefix hits need no second book. It feeds every committed token
it has not seen in one pass (the newest one, after full acceptance two, after a pause all that were
missed, after a prefix hit only pages it never filled), then one token per further draft.

Source: Leviathan et al. 2023 and Chen et al. 2023; algorithm and pitfalls of the KV after partial
acceptance are in docs/losslessness.md.
"""

from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.models.tensors import Draft, RolledOut, RolloutPlan, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.models.language import DraftLanguageModel
from foretoken.proposers.progress import DraftLimits, DraftProgress, Stretches
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sequence import Sequence


class DraftModelProposer(Proposer):
    """Drafts with a second model that shares the target's vocabulary and page tables."""

    name = "draft_model"

    def __init__(
        self,
        runner: DraftLanguageModel,
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
        self._progress = DraftProgress(generations, runner.page_size, limits)

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
        return self._progress.fits(span)

    def catch_up(self, spans: list[Span]) -> Tensor:
        """Feed every committed token without draft KV; logits after the newest of each span."""

        def feed(index: int, start: int, end: int) -> None:
            self._runner.forward_last(*_places([spans[index]], Stretches([start], [end])))

        return self._runner.forward_last(*_places(spans, self._progress.caught_up(spans, feed)))

    def missing(self, spans: list[Span]) -> tuple[list[SpanLayout], list[list[int]]]:
        """Where the committed tokens stand that the draft has not seen, and what they are."""
        return _places(spans, self._progress.missing(spans))


def _places(spans: Seq[Span], fed: Stretches) -> tuple[list[SpanLayout], list[list[int]]]:
    """Where the tokens of a stretch of each sequence lie, and what they are."""
    layouts, ids = [], []
    for span, start, end in zip(spans, fed.starts, fed.ends, strict=True):
        sequence = span.sequence
        layouts.append(
            SpanLayout(start=start, num_tokens=end - start, page_table=sequence.page_table)
        )
        ids.append(sequence.token_ids[start:end])
    return layouts, ids


class _ModelSteps(ChainSteps):
    """One pass over what the draft has not seen, then one token of each sequence a pass."""

    rolls_out = True

    def __init__(self, proposer: DraftModelProposer, spans: list[Span]) -> None:
        self._proposer, self._spans = proposer, spans
        self._runner = proposer._runner

    def first(self) -> Tensor:
        return self._proposer.catch_up(self._spans)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        return self._runner.forward_last(*self._newest(active, drafted))

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        # The first call also feeds what the draft has not seen: mostly one or two tokens.
        begun = bool(drafted[0])
        fed = self._newest(active, drafted) if begun else self._proposer.missing(self._spans)
        return self._runner.roll_out(*fed, plan)

    def _newest(
        self, active: list[int], drafted: list[list[int]]
    ) -> tuple[list[SpanLayout], list[list[int]]]:
        """Where the newest drafted token of each span stands, and what it is."""
        sequences = [self._spans[i].sequence for i in active]
        layouts = [
            SpanLayout(
                start=sequence.num_tokens + len(tokens) - 1,
                num_tokens=1,
                page_table=sequence.page_table,
            )
            for sequence, tokens in zip(sequences, drafted, strict=True)
        ]
        return layouts, [tokens[-1:] for tokens in drafted]
