"""A draft model with another tokenizer, through text: it continues the text in its own tokens.

Each sequence has a shadow: its text in the draft's tokens, with pages of the draft's own. The
shadow is drafted greedily by an ordinary draft model, and what that adds is cut into the target's
tokens. These drafts are one-hot and a function of the committed tokens, so matching keeps outputs
identical and the rejection rule keeps them distributed as they should be.

Source: string-level exact match of Timor et al. 2025 (arXiv 2502.05202).
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import final

from foretoken.kv import table as tables
from foretoken.kv.pool import PagePool
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.proposers.vocab.bytes import ByteEncoder, ByteText, complete
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.types import Request, SamplingParams

_LOOK_BACK = 8
"""Committed tokens before a draft that its text is cut together with."""
_GREEDY = SamplingParams(temperature=0.0, max_tokens=None, detokenize=False)


@dataclass(slots=True)
class _Shadow:
    """One sequence in the draft's tokens."""

    text: ByteText
    sequence: Sequence
    num_seen: int
    """Committed tokens of the target that `text` holds."""
    used_at: int = 0
    """Number of the step that drafted with it last."""


@final
class StringDraftProposer(Proposer):
    """Drafts text with a model that has another tokenizer."""

    def __init__(
        self, inner: KVProposer, pool: PagePool, target: ByteEncoder, draft: ByteEncoder
    ) -> None:
        """Draft with `inner`.

        Args:
            inner: drafts greedily over the draft's own vocabulary.
            pool: the pages of its store; this proposer's own.
            target: cuts text into the target's tokens.
            draft: cuts text into the draft's.
        """
        self.name = inner.name
        self._inner = inner
        self._pool = pool
        self._target = target
        self._draft = draft
        self._shadows: dict[str, _Shadow] = {}
        self._num_steps = 0

    def propose(self, context: Context) -> Draft:
        self._num_steps += 1
        ids: list[tuple[int, ...]] = [()] * len(context.spans)
        places, spans = [], []
        for i in context.wanted:
            span = self._shadow_span(context.spans[i])
            if span is not None:
                places.append(i)
                spans.append(span)
        if spans:
            found = self._inner.propose(Context(tuple(spans)))
            for i, drafted in zip(places, found.ids, strict=True):
                if drafted:
                    ids[i] = self._in_target_tokens(context.spans[i], drafted)
        return Draft(ids=tuple(ids), drafter=self.name)

    def num_missing(self, sequence: Sequence) -> int:
        """In tokens of the target for text that was not read yet, of the draft for the rest."""
        shadow = self._shadows.get(sequence.request.request_id)
        if shadow is None:
            return sequence.num_tokens
        unread = sequence.num_tokens - shadow.num_seen
        return unread + self._inner.num_missing(shadow.sequence)

    @property
    def max_window(self) -> int:
        """As far as the draft's context reaches, in its own tokens."""
        return self._inner.max_window

    def feed(self, sequences: Seq[Sequence], most_rows: int, window: int | None = None) -> int:
        self._num_steps += 1
        shadows = [self._caught_up(sequence) for sequence in sequences]
        found = [s.sequence for s in shadows if s.sequence.token_ids and self._has_pages(s, 0)]
        return self._inner.feed(found, most_rows, window)

    def release(self, request_id: str) -> None:
        shadow = self._shadows.pop(request_id, None)
        if shadow is not None:
            tables.clear(self._pool, shadow.sequence.page_table)
            self._inner.release(request_id)

    def _shadow_span(self, span: Span) -> Span | None:
        """The shadow of a span, with pages for its drafts; None if it cannot be continued."""
        shadow = self._caught_up(span.sequence)
        sequence = shadow.sequence
        budget = self._budget(span, sequence)
        if not shadow.text.is_whole or not sequence.token_ids:
            return None
        if not self._has_pages(shadow, budget):
            return None
        return Span(
            sequence=sequence,
            start=sequence.num_tokens - 1,
            length=1,
            draft_budget=budget,
            samples=True,
        )

    def _has_pages(self, shadow: _Shadow, budget: int) -> bool:
        """Give a shadow pages for its tokens and `budget` more; others that rest lose theirs."""
        shadow.used_at = self._num_steps
        table = shadow.sequence.page_table
        needed = shadow.sequence.num_tokens + budget
        while tables.missing_pages(self._pool, table, needed) > self._pool.num_available:
            if not self._evict_one():
                return False
        tables.truncate(self._pool, table, needed)
        tables.grow(self._pool, table, needed)
        return True

    def _caught_up(self, sequence: Sequence) -> _Shadow:
        """The sequence's shadow, with every committed token."""
        request = sequence.request
        shadow = self._shadows.get(request.request_id)
        if shadow is None:
            shadow = self._shadows[request.request_id] = self._new_shadow(request)
        fresh = sequence.token_ids[shadow.num_seen :]
        if shadow.num_seen == 0 and fresh[:1] == [self._target.table.bos_token_id]:
            fresh = fresh[1:]
        kept = shadow.text.extend(self._target.table.join(fresh))
        shadow.num_seen = sequence.num_tokens
        shadow.sequence.token_ids = shadow.text.ids
        self._inner.progress.rewind(shadow.sequence, kept)
        return shadow

    def _new_shadow(self, request: Request) -> _Shadow:
        text = ByteText(self._draft)
        mirrored = Request(
            request_id=request.request_id,
            prompt_token_ids=tuple(text.ids),
            params=_GREEDY,
            seed=0,
            max_tokens=1,
        )
        sequence = Sequence(request=mirrored, token_ids=text.ids, num_prompt=0)
        return _Shadow(text=text, sequence=sequence, num_seen=0)

    def _budget(self, span: Span, shadow: Sequence) -> int:
        """Draft tokens for about the text of draft_budget target tokens."""
        share = shadow.num_tokens / span.sequence.num_tokens
        return max(1, round(span.draft_budget * min(share, 2.0)))

    def _evict_one(self) -> bool:
        """Take the pages of the shadow that has not been used for longest; False: none can go."""
        idle = [
            shadow
            for shadow in self._shadows.values()
            if shadow.used_at < self._num_steps and shadow.sequence.page_table
        ]
        if not idle:
            return False
        shadow = min(idle, key=lambda one: one.used_at)
        tables.clear(self._pool, shadow.sequence.page_table)
        self._inner.release(shadow.sequence.request.request_id)
        return True

    def _in_target_tokens(self, span: Span, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Drafted text in the target's tokens, at most draft_budget of them."""
        data = complete(self._draft.table.join(list(drafted)))
        before = self._target.table.join(span.sequence.token_ids[-_LOOK_BACK:])
        while before and before[0] & 0xC0 == 0x80:
            before = before[1:]
        return tuple(self._target.encode_after(before, data)[: span.draft_budget])
