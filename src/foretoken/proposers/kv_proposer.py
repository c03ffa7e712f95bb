"""Drafters with keys and values of their own, under the target's page tables.

Their KV lies in their own tensors but under the target's pages. `kv_progress.py` says
what they have to be fed before they draft; `KVProposer` is a step of any such drafter; what is run
is the business of its network and its steps.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.drafting import DraftSampling
from foretoken.proposers.kv_progress import DraftProgress, Stretches
from foretoken.proposers.steps import DraftSteps
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence


class DraftNetwork(ABC):
    """A model or a head with its keys and values: what is run, for `KVProposer`.

    Sequences are as `DraftProgress` sees them.
    """

    max_drafts: int | None = None
    """Most drafts of a chain; None: as many as are wanted."""
    drafts_blocks: bool = False
    """Whether drafts are masks of a block, which one pass fills in."""

    @abstractmethod
    def steps(self, spans: list[Span], fed: Stretches, depths: list[int]) -> DraftSteps:
        """The steps of one draft.

        Args:
            spans: that want a draft.
            fed: what is to be fed of each before.
            depths: the most drafts of each one after the other.
        """

    @abstractmethod
    def feed(self, sequences: Seq[Sequence], fed: Stretches) -> None:
        """Run places of sequences in one pass for their keys and values alone."""


class KVProposer(Proposer):
    """Drafts chains or trees with a model or a head that keeps keys and values."""

    def __init__(
        self, name: str, network: DraftNetwork, drafting: DraftSampling, progress: DraftProgress
    ) -> None:
        """Nothing is fed yet.

        Args:
            name: the word the user typed.
            network: what is run.
            drafting: how its tokens are chosen.
            progress: the book of the drafter's keys and values, and how far they may reach.
        """
        self.name = name
        self.network, self.progress, self.drafting = network, progress, drafting
        self.drafts_blocks = network.drafts_blocks

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        progress = self.progress
        every = self.drafting.clipped(context.spans, self.network.max_drafts)
        wanted = [
            i for i in context.wanted if progress.prepare(every[i].sequence, every[i].draft_budget)
        ]
        if not wanted:
            return Draft.empty(len(every))
        spans = [every[i] for i in wanted]
        steps = self.make_steps(spans)
        draft, fed = self.drafting.draft(steps, spans, wanted, len(every), self.name)
        for span, tokens in zip(spans, fed, strict=True):
            progress.record(span.sequence, tokens if steps.keeps_drafts else ())
        return draft

    def make_steps(self, spans: list[Span]) -> DraftSteps:
        """The steps of one draft, after what does not fit their first pass was fed."""
        progress, network, depths = self.progress, self.network, [s.draft_budget for s in spans]
        if self.drafting.trees is not None:
            depths = [min(depth, self.drafting.trees.depth) for depth in depths]
        missing, seen = progress.missing(spans), [_seen(progress, span) for span in spans]

        def feed(index: int, start: int, end: int) -> None:
            network.feed([seen[index].sequence], Stretches([start], [end]))

        fed = missing.within(progress.limits.max_num_batched_tokens, feed)
        return network.steps(seen, fed, depths)

    def num_missing(self, sequence: Sequence) -> int:
        """Places without keys and values, the newest included, which is fed with every draft."""
        return self.progress.num_missing(sequence)

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        return self.progress.num_queried_tokens, self.progress.num_hit_tokens

    @property
    def max_window(self) -> int:
        """As far as its context reaches; 0 where the whole sequence has to be known."""
        limits = self.progress.limits
        return limits.max_model_len if limits.enters else 0

    @torch.inference_mode()
    def feed(self, sequences: Seq[Sequence], most_rows: int, window: int | None = None) -> int:
        """One pass over what is missing; the newest places are left to the drafts."""
        progress, left = self.progress, self.progress.limits.max_num_batched_tokens
        seen, starts, ends, fed = list[Sequence](), list[int](), list[int](), list[Sequence]()
        for sequence in sequences:
            if window is not None:
                progress.enter(sequence, window)
            start, end = progress.to_feed(sequence, min(most_rows, left))
            if start < end:
                left -= end - start
                view = progress.seen(sequence)
                before = sequence.num_tokens - view.num_tokens
                starts.append(start - before)
                ends.append(end - before)
                seen.append(view)
                fed.append(sequence)
        if not fed:
            return 0
        self.network.feed(seen, Stretches(starts, ends))
        for sequence, view, end in zip(fed, seen, ends, strict=True):
            progress.record_until(sequence, end + sequence.num_tokens - view.num_tokens)
        return sum(ends) - sum(starts)

    def release(self, request_id: str) -> None:
        self.progress.release(request_id)
        self.drafting.sampler.release(request_id)


def _seen(progress: DraftProgress, span: Span) -> Span:
    """The span over what the drafter sees of its sequence."""
    sequence = progress.seen(span.sequence)
    return span if sequence is span.sequence else replace(span, sequence=sequence)
