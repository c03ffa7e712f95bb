"""Drafters with keys and values of their own, under the target's page tables.

Their KV lies in their own tensors but under the target's pages, so allocation, preemption and
prefix hits need no second book. `DraftProgress` keeps per request how many positions are valid and
which drafted tokens stand after them, and per page whether it was filled for what it holds now (so
that a prefix hit finds the drafter's KV too). From this follows what a drafter has to be fed before
it drafts. `KVProposer` is a step of any such drafter; what is run is the business of its steps.
Pitfalls of such KV after partial acceptance are in docs/losslessness.md.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.chain import ChainSteps, draft_chain
from foretoken.proposers.confidence import Confidence
from foretoken.proposers.tree import (
    SpanTree,
    TreeShape,
    TreeSteps,
    draft_of_trees,
    draft_trees,
    start_trees,
)
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLimits:
    """How far a drafter with KV of its own may go."""

    max_model_len: int
    """No drafts for sequences that would outgrow this many tokens."""
    max_num_batched_tokens: int
    """Most tokens of one pass."""
    padded_to: int = 0
    """What is fed before the first draft is made equally long for all sequences that miss at most
    so many places; 0: each feeds what it misses."""

    def starts(self, starts: Seq[int], ends: Seq[int]) -> list[int]:
        """Where the stretches to be fed begin, given those of what is missing: padding feeds
        places before them again, as far as there are any."""
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        longest = max((n for n in counts if n <= self.padded_to), default=0)
        padded = zip(starts, ends, counts, strict=True)
        return [max(0, end - longest) if n < longest else start for start, end, n in padded]


@dataclass(frozen=True, slots=True)
class Stretches:
    """What is to be fed of some sequences: places [start, end) of each."""

    starts: list[int]
    ends: list[int]

    def within(self, most: int, feed: Callable[[int, int, int], object]) -> "Stretches":
        """What is left for one pass of at most `most` places, at least one of each sequence.

        Args:
            most: places of a pass.
            feed: (index, start, end) feeds what has to go ahead, from the longest stretch first.
        """
        starts, ends = list(self.starts), self.ends
        while sum(ends) - sum(starts) > most:
            longest = max(range(len(starts)), key=lambda i: ends[i] - starts[i])
            stop = min(ends[longest] - 1, starts[longest] + most)
            feed(longest, starts[longest], stop)
            starts[longest] = stop
        return Stretches(starts, ends)


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one sequence has."""

    num_preemptions: int
    """Preemptions of the sequence when this was written: a preempted one has new pages."""
    num_valid: int
    """Committed positions with valid KV."""
    drafted: tuple[int, ...]
    """Draft tokens whose KV stands after those."""


class DraftProgress:
    """The book of one drafter."""

    def __init__(
        self,
        generations: Seq[int],
        page_size: int,
        limits: DraftLimits,
        *,
        joins_next: bool = False,
    ) -> None:
        """Start empty.

        Args:
            generations: the page pool's count of how often each page changed its contents.
            page_size: positions of a page.
            limits: of sequences and passes.
            joins_next: whether what is kept at a place also depends on the token at the next one,
                so that the newest token has no place yet (heads of the EAGLE family).
        """
        self.limits = limits
        self._generations = generations
        self._page_size = page_size
        self._joins_next = int(joins_next)
        self._filled: dict[int, int] = {}
        self._reaches: dict[str, _Reach] = {}

    def fits(self, span: Span) -> bool:
        """Whether the span's drafts would stay within the drafter's context."""
        return span.sequence.num_tokens + span.draft_budget <= self.limits.max_model_len

    def missing(self, spans: Seq[Span]) -> Stretches:
        """What the drafter has to be fed of each span before its first draft.

        The newest place is always fed again, because its output is what drafting begins with.
        """
        ends = [span.sequence.num_tokens - self._joins_next for span in spans]
        first = [
            max(0, min(self._valid(span.sequence), end - 1))
            for span, end in zip(spans, ends, strict=True)
        ]
        return Stretches(self.limits.starts(first, ends), ends)

    def caught_up(self, spans: Seq[Span], feed: Callable[[int, int, int], object]) -> Stretches:
        """What is `missing`, after what does not fit one pass was fed.

        `feed` (index, start, end) feeds a part of one span's stretch.
        """
        return self.missing(spans).within(self.limits.max_num_batched_tokens, feed)

    def _valid(self, sequence: Sequence) -> int:
        """Leading places that need not be fed.

        The last place of a page that another request filled is not among them where it depends on
        the next token: that token need not be the same here.
        """
        valid = self.num_valid(sequence)
        return valid if self._reach(sequence) is not None else valid - self._joins_next

    def num_valid(self, sequence: Sequence) -> int:
        """Leading positions of `sequence` whose KV can be used."""
        reach = self._reach(sequence)
        if reach is None:
            return self._num_filled(sequence.page_table) * self._page_size
        valid = reach.num_valid
        committed = sequence.token_ids[valid:]
        for drafted, token in zip(reach.drafted, committed, strict=False):
            if drafted != token:
                break
            valid += 1
        return valid

    def record(self, sequence: Sequence, drafted: Seq[int] = ()) -> None:
        """All committed tokens were fed, and `drafted` ones after them."""
        num_valid = sequence.num_tokens - self._joins_next
        before = self._reach(sequence)
        first = 0 if before is None else before.num_valid // self._page_size
        for page in sequence.page_table[first : num_valid // self._page_size]:
            self._filled[page] = self._generations[page]
        reach = _Reach(sequence.num_preemptions, num_valid, tuple(drafted))
        self._reaches[sequence.request.request_id] = reach

    def rewind(self, sequence: Sequence, num_kept: int) -> None:
        """Tokens of `sequence` from `num_kept` on are not those that were there before."""
        reach = self._reach(sequence)
        if reach is None or reach.num_valid <= num_kept:
            return
        self._reaches[sequence.request.request_id] = _Reach(reach.num_preemptions, num_kept, ())
        for page in sequence.page_table[num_kept // self._page_size :]:
            self._filled.pop(page, None)

    def release(self, request_id: str) -> None:
        """Forget a request; its pages keep their marks."""
        self._reaches.pop(request_id, None)

    def _reach(self, sequence: Sequence) -> _Reach | None:
        reach = self._reaches.get(sequence.request.request_id)
        same = reach is not None and reach.num_preemptions == sequence.num_preemptions
        return reach if same else None

    def _num_filled(self, page_table: list[int]) -> int:
        """Leading pages whose KV was written for their present contents."""
        for count, page in enumerate(page_table):
            if self._filled.get(page) != self._generations[page]:
                return count
        return len(page_table)


class KVSteps(ChainSteps, ABC):
    """What a drafter with KV of its own runs in one step, for some spans."""

    keeps_drafts: bool = False
    """Whether the KV of a draft that was fed is that of the token, should it be accepted. It is not
    where guesses stand in the place of features or tokens."""

    @abstractmethod
    def trees(self) -> TreeSteps:
        """The steps of a draft of trees; asked with nothing run yet, and then nothing else."""


MakeSteps = Callable[[list[Span]], KVSteps]
"""The steps of one draft of these spans."""


class KVProposer(Proposer):
    """Drafts chains or trees with a model or a head that keeps keys and values."""

    def __init__(
        self,
        name: str,
        make_steps: MakeSteps,
        sampler: DraftSampler,
        progress: DraftProgress,
        *,
        trees: TreeShape | None = None,
        confidence: Confidence | None = None,
    ) -> None:
        """Nothing is fed yet.

        Args:
            name: the word the user typed.
            make_steps: what is run in a step.
            sampler: turns logits into tokens and, under rejection, distributions.
            progress: the book of the drafter's keys and values, and how far they may reach.
            trees: the shape of trees; None: chains.
            confidence: where chains stop before their budget; default: nowhere.
        """
        self.name = name
        self.make_steps = make_steps
        self.progress = progress
        self._sampler = sampler
        self._trees, self._confidence = trees, confidence
        self.gain = None if confidence is None else confidence.gain

    @torch.inference_mode()
    def propose(self, context: Context) -> Draft:
        """Drafts of the spans that want one and still fit the drafter's context."""
        wanted = [i for i in context.wanted if self.progress.fits(context.spans[i])]
        if not wanted:
            return Draft.empty(len(context.spans))
        spans, count = [context.spans[i] for i in wanted], len(context.spans)
        steps = self.make_steps(spans)
        if self._trees is None:
            drafted = draft_chain(steps, self._sampler, spans, self._confidence)
            draft = drafted.as_draft(wanted, count, self.name)
            # The last draft of a chain was chosen and never fed.
            fed = [tokens[:-1] for tokens in drafted.ids]
        else:
            trees = start_trees(self._trees, spans)
            found = draft_trees(steps.trees(), self._sampler, trees)
            draft = draft_of_trees(found, wanted, count, self.name)
            fed = [_first_branch(tree) for tree in trees]
        for span, tokens in zip(spans, fed, strict=True):
            self.progress.record(span.sequence, tokens if steps.keeps_drafts else ())
        return draft

    def release(self, request_id: str) -> None:
        """Forget how far a request's KV reached; its pages keep their marks."""
        self.progress.release(request_id)
        self._sampler.release(request_id)


def _first_branch(tree: SpanTree) -> list[int]:
    """Tokens of the first branch that were fed. They lie where those of a chain would; an accepted
    branch beside it is fed again."""
    found: list[int] = []
    for place, node in enumerate(tree.growth.inner):
        if len(tree.growth.path(node)) != place + 1:
            break
        found.append(tree.growth.tokens[node])
    return found
