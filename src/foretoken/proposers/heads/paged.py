"""EAGLE, EAGLE-3 and P-EAGLE: drafting from the target's features with keys and values of its own.

Slot i of the head pairs the target's features at position i with the token at i + 1; it lies under
the target's page tables. A call feeds every slot whose features came since the last one (after a
pause all that were missed, after a prefix hit those that no request filled), which gives the first
draft; further drafts continue from the head's own outputs and are overwritten when true features
come. P-EAGLE fills the places of unknown features with its mask and drafts in the same pass.

Source: Li et al. 2024, 2025 (EAGLE to EAGLE-3); P-EAGLE (arXiv 2602.01469).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.models.tensors import Draft, SpanLayout
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainDraft, ChainSteps, Rolled, draft_chain, take_rolled
from foretoken.proposers.confidence import Confidence, Stopping
from foretoken.proposers.heads.eagle3.parallel import ParallelSteps
from foretoken.proposers.heads.feed import HeadFeed
from foretoken.proposers.heads.runner import HeadRunner
from foretoken.proposers.heads.trees import DepthSteps, EagleTreeSteps
from foretoken.proposers.progress import DraftLimits, DraftProgress, feed_ahead
from foretoken.proposers.tree import TreeShape, TreeSteps, draft_trees, planted, spread
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleManner:
    """What is drafted, and how."""

    parallel: bool = False
    """Whether all tokens come of one pass (P-EAGLE)."""
    mask_token_id: int | None = None
    """Of a parallel head; None: its mask slots repeat the newest token."""
    shape: TreeShape | None = None
    """Of trees; None: chains."""
    confidence: Confidence | None = None
    """Where chains stop before their budget; None: nowhere."""


class EagleProposer(Proposer):
    """Drafts with an EAGLE head."""

    def __init__(
        self,
        name: str,
        runner: HeadRunner,
        sampler: DraftSampler,
        progress: DraftProgress,
        *,
        limits: DraftLimits,
        manner: EagleManner | None = None,
    ) -> None:
        """Draft with `runner`.

        Args:
            name: the word the user typed.
            runner: the network over its own KV store.
            sampler: turns logits into tokens and, under rejection, distributions.
            progress: the book of the head's keys and values, in slots.
            limits: of sequences and passes; the head's context also counts.
            manner: default: chains, one token a pass.
        """
        self.name = name
        self._runner = runner
        self._sampler = sampler
        self._progress = progress
        manner = manner or EagleManner()
        self._manner, self._shape = manner, manner.shape
        self.gain = None if manner.confidence is None else manner.confidence.gain
        self._max_model_len = min(limits.max_model_len, runner.max_positions)
        self._limits = limits

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one."""
        wanted = [i for i in context.wanted if self._fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        spans = [context.spans[i] for i in wanted]
        starts, count = self._feed_all_but_last_pass(spans), len(context.spans)
        if self._shape is None:
            draft = self._chains(spans, starts).spread(wanted, count, self.name)
        else:
            trees = planted(self._shape, spans)
            found = draft_trees(self._tree_steps(spans, starts), self._sampler, trees)
            draft = spread(found, wanted, count, self.name)
        for span in spans:
            self._progress.record(span.sequence, span.sequence.num_tokens - 1)
        return draft

    def release(self, request_id: str) -> None:
        """Forget how far a request's slots reached."""
        self._progress.release(request_id)
        self._sampler.release(request_id)

    def _chains(self, spans: list[Span], starts: list[int]) -> ChainDraft:
        counts = [span.draft_budget for span in spans]
        if self._manner.parallel:
            masked = self._parallel(spans, starts, counts)
            return draft_chain(masked, self._sampler, spans, self._manner.confidence)
        steps = _RecurrentSteps(self._runner, spans, starts, self._sampler)
        return draft_chain(steps, self._sampler, spans, self._manner.confidence)

    def _tree_steps(self, spans: list[Span], starts: list[int]) -> TreeSteps:
        assert self._shape is not None, "asked for trees"
        if not self._manner.parallel:
            chain = _RecurrentSteps(self._runner, spans, starts, self._sampler)
            return EagleTreeSteps(self._runner, spans, chain.feed)
        counts = [min(span.draft_budget, self._shape.depth) for span in spans]
        return DepthSteps(self._parallel(spans, starts, counts).at, len(spans))

    def _parallel(self, spans: list[Span], starts: list[int], counts: list[int]) -> ParallelSteps:
        masks = self._manner.mask_token_id, counts
        return ParallelSteps(self._runner, spans, starts, masks, self._sampler)

    def _fits(self, span: Span) -> bool:
        return span.sequence.num_tokens + span.draft_budget <= self._max_model_len

    def _feed_all_but_last_pass(self, spans: list[Span]) -> list[int]:
        """Feed what does not fit one pass; first slot of each span that is still to be fed."""
        ends = [span.sequence.num_tokens - 1 for span in spans]
        starts = self._limits.starts([self._first_missing(s.sequence) for s in spans], ends)

        def feed(index: int, start: int, stop: int) -> None:
            slots = HeadFeed.of([spans[index]], [start], [stop])
            hidden_TD = self._runner.mixed_features(slots.layouts)
            self._runner.forward(slots.layouts, slots.tokens, hidden_TD)

        feed_ahead(starts, ends, self._limits.max_num_batched_tokens, feed)
        return starts

    def _first_missing(self, sequence: TokenSequence) -> int:
        """The first slot without valid KV; the newest one is always fed again.

        A slot also depends on the token after it, which a page filled by another request need not
        share for its last slot.
        """
        valid = self._progress.num_valid(sequence)
        known = self._progress.knows(sequence)
        return max(0, min(valid if known else valid - 1, sequence.num_tokens - 2))


class _RecurrentSteps(ChainSteps):
    """One pass over the true features, then one slot a token from the head's own outputs."""

    def __init__(
        self, runner: HeadRunner, spans: list[Span], starts: list[int], sampler: DraftSampler
    ) -> None:
        self._runner, self._spans, self._starts = runner, spans, starts
        self._sampler = sampler
        self._rows = list(range(len(spans)))
        self._output_BD: Tensor | None = None

    def feed(self) -> Tensor:
        """The outputs at the newest true slot of each span, [B, D]."""
        feed = HeadFeed.missing(self._spans, self._starts)
        hidden_TD = self._runner.mixed_features(feed.layouts)
        outputs_TD = self._runner.forward(feed.layouts, feed.tokens, hidden_TD)
        return outputs_TD[feed.last_rows]

    def roll_out(
        self,
        active: list[int],
        drafted: list[list[int]],
        *,
        with_probs: bool,
        stopping: Stopping | None = None,
    ) -> Rolled | None:
        sequences = [self._spans[i].sequence for i in active]
        left = [self._spans[i].draft_budget - len(n) for i, n in zip(active, drafted, strict=True)]
        plan = self._sampler.plan(sequences, drafted, min(left), with_probs=with_probs)
        if plan is None:
            return None
        if stopping is not None:
            plan = stopping.on(plan, active, len(drafted[0]))
        stream_BD = None
        if drafted[0]:
            layouts, tokens, stream_BD = self._next(active, drafted)
        else:
            feed = HeadFeed.missing(self._spans, self._starts)
            layouts, tokens = feed.layouts, feed.tokens
        found = self._runner.roll_out(layouts, [tokens], plan, stream_BD)
        if found is None:
            return None
        self._output_BD, self._rows = found.stream_BD, active
        return take_rolled(found, self._sampler, sequences, drafted)

    def first(self) -> Tensor:
        self._output_BD = self.feed()
        return self._runner.logits(self._output_BD)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        layouts, newest, stream_BD = self._next(active, drafted)
        self._output_BD, self._rows = self._runner.forward(layouts, newest, stream_BD), active
        return self._runner.logits(self._output_BD)

    def _next(
        self, active: list[int], drafted: list[list[int]]
    ) -> tuple[list[SpanLayout], list[int], Tensor]:
        """Slots of the newest drafts, these, and the outputs that they came from."""
        assert self._output_BD is not None, "the first slots were fed before"
        stream_BD = self._output_BD
        if len(active) < len(self._rows):
            stream_BD = stream_BD[[self._rows.index(i) for i in active]]
        layouts = [
            SpanLayout(
                start=self._spans[i].sequence.num_tokens + len(tokens) - 2,
                num_tokens=1,
                page_table=self._spans[i].sequence.page_table,
            )
            for i, tokens in zip(active, drafted, strict=True)
        ]
        return layouts, [tokens[-1] for tokens in drafted], stream_BD
