"""What one step runs, spans of tokens, some of them followed by drafts; and what it comes to.

Prefill, decode and verification are one thing. A span covers committed tokens
[start, start + length) of its sequence and then its drafts. If it reaches the newest committed
token it samples: one row of logits for that token and one per draft.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from foretoken.control.plan import NO_DRAFTS, DraftPlan
from foretoken.models.tensors import Draft
from foretoken.runtime.draft_tree import Tree, is_chain, tree_of
from foretoken.runtime.sequence import Sequence
from foretoken.types import Logprob, TokenSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One sequence's part of a step. Rows = prompt_rows + sample_rows, in position order."""

    sequence: Sequence
    start: int
    length: int
    draft_budget: int = 0
    """Most drafts this span may carry; its pages are already reserved."""
    draft_ids: tuple[int, ...] = ()
    draft_parents: tuple[int, ...] | None = None
    """The parent of each draft if they are a tree (`Draft.parents`); None: they are a chain."""
    drafter: str = ""
    """Who proposed draft_ids; empty if nobody did."""
    promise: float | None = None
    """How many of draft_ids the drafter expects to be accepted; None: it has no opinion."""
    samples: bool
    """Whether the span reaches the newest committed token."""
    wants_prompt_logprobs: bool = False
    """Whether every committed position of the span needs logits."""
    after: int | None = None
    """The span of the step before that gives this one its only token, which nobody knows yet."""

    @property
    def num_drafts(self) -> int:
        """Draft tokens in the span."""
        return len(self.draft_ids)

    @property
    def tree(self) -> Tree | None:
        """The shape of the drafts unless they are a chain."""
        return None if self.draft_parents is None else tree_of(self.draft_parents)

    @property
    def draft_depth(self) -> int:
        """Most drafts of the span that can be accepted."""
        tree = self.tree
        return self.num_drafts if tree is None else tree.depth

    @property
    def num_tokens(self) -> int:
        """Rows of the forward: committed tokens and drafts."""
        return self.length + len(self.draft_ids)

    @property
    def sample_rows(self) -> int:
        """Rows of logits that choose tokens: the newest token's and one per draft."""
        return 1 + len(self.draft_ids) if self.samples else 0

    @property
    def prompt_rows(self) -> int:
        """Rows of logits before those, for prompt logprobs."""
        return self.length - int(self.samples) if self.wants_prompt_logprobs else 0

    def clipped(self, max_drafts: int) -> Self:
        """This span, its budget lowered to `max_drafts`."""
        if self.draft_budget <= max_drafts:
            return self
        return replace(self, draft_budget=max_drafts)

    @property
    def input_ids(self) -> list[int]:
        """Token ids of the forward, drafts last; length num_tokens. Of `after`: that."""
        if self.after is not None:
            return [self.after]
        tokens = self.sequence.token_ids[self.start : self.start + self.length]
        tokens.extend(self.draft_ids)
        return tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The spans of a step; `draft` is None until the proposer has been asked."""

    spans: tuple[Span, ...]
    draft: Draft | None = None
    plan: DraftPlan = NO_DRAFTS
    """How far the spans were allowed to draft, for those that learn from the step."""

    @property
    def num_tokens(self) -> int:
        """Rows of the forward."""
        return sum(span.num_tokens for span in self.spans)

    @property
    def follows(self) -> bool:
        """Whether it begins before the tokens of the step before are known."""
        return any(span.after is not None for span in self.spans)

    @property
    def num_drafts(self) -> int:
        """Draft tokens over all spans."""
        return sum(span.num_drafts for span in self.spans)

    def with_draft(self, draft: Draft) -> Self:
        """This batch with the drafts of its spans; asserts that no budget is exceeded."""
        assert len(draft.ids) == len(self.spans), (len(draft.ids), len(self.spans))
        draft.check()
        spans = []
        nothing = (None,) * len(self.spans)
        shapes, promises = draft.parents or nothing, draft.promises or nothing
        each = zip(self.spans, draft.ids, shapes, draft.names, promises, strict=True)
        for span, ids, parents, drafter, promise in each:
            assert len(ids) <= span.draft_budget, (len(ids), span.draft_budget)
            if not ids:
                spans.append(span)
                continue
            shape = None if parents is None or is_chain(parents) else parents
            drafted = replace(
                span, draft_ids=ids, draft_parents=shape, drafter=drafter, promise=promise
            )
            spans.append(drafted)
        return replace(self, spans=tuple(spans), draft=draft)

    def with_more(self, spans: Iterable[Span]) -> Self:
        """This batch with spans behind its own, which have no drafts."""
        every = (*self.spans, *spans)
        draft = None if self.draft is None else self.draft.over(len(every))
        return replace(self, spans=every, draft=draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanVerification:
    """What one span of a step came to."""

    new_ids: tuple[int, ...]
    """Accepted drafts and one token of the target; empty if the span does not sample."""
    num_accepted: int
    num_drafted: int
    sources: tuple[TokenSource, ...]
    """Where each new token came from."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per new token, if asked for; from raw logits."""
    prompt_logprobs: tuple[dict[int, Logprob], ...] | None = None
    """Per prompt row, if asked for: of the token after that row's."""
    path: tuple[int, ...] | None = None
    """Accepted nodes of a tree of drafts, from the root down; None: the drafts were a chain."""
    valid: bool = True
    """False: the rule keeps drafts whatever they are (`synthetic`)."""


@dataclass(frozen=True, slots=True)
class Verification:
    """One entry per span of the batch; None for spans without rows of logits."""

    spans: tuple[SpanVerification | None, ...]

    @property
    def paths(self) -> tuple[tuple[int, ...] | None, ...]:
        """Per span what stays of a tree of drafts; None: a chain, or nothing was drafted."""
        return tuple(None if span is None else span.path for span in self.spans)
