"""Drafters that draft by chance or by known outputs: whatever they draft, no output may change."""

import random

from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.runtime.batch import Span


class JunkProposer(Proposer):
    """Drafts random tokens of random number: must change no output bit."""

    name = "junk"

    def __init__(self, vocab_size: int, *, seed: int = 0) -> None:
        """Draw tokens below `vocab_size`."""
        self._vocab_size = vocab_size
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """0 to draft_budget random tokens per span."""
        draw = self._random
        ids = tuple(
            tuple(draw.randrange(self._vocab_size) for _ in range(draw.randint(0, s.draft_budget)))
            for s in context.spans
        )
        return Draft(ids=ids, drafter=self.name)

    def release(self, request_id: str) -> None: ...


class ReplayProposer(Proposer):
    """Drafts from known outputs, wrong with a given probability: sometimes-agreeing drafts."""

    name = "replay"

    def __init__(
        self, outputs: dict[str, list[int]], vocab_size: int, *, wrong: float = 0.0, seed: int = 0
    ) -> None:
        """Know the plain output of each request id; spoil each drafted token by chance."""
        self._outputs = outputs
        self._vocab_size = vocab_size
        self._wrong = wrong
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """The next known tokens of each span."""
        return Draft(
            ids=tuple(
                self._draft(s.sequence.request.request_id, s.sequence.num_output, s.draft_budget)
                for s in context.spans
            ),
            drafter=self.name,
        )

    def release(self, request_id: str) -> None: ...

    def _draft(self, request_id: str, at: int, count: int) -> tuple[int, ...]:
        known = self._outputs.get(request_id, [])[at : at + count]
        draw = self._random
        return tuple(
            draw.randrange(self._vocab_size) if draw.random() < self._wrong else token
            for token in known
        )


class TreeProposer(Proposer):
    """Drafts random trees that may hide known outputs: must change no output bit.

    Without known outputs every branch is junk; with them, one branch of each tree begins with
    the right tokens, at a random place among its siblings.
    """

    name = "trees"

    def __init__(
        self, vocab_size: int, *, outputs: dict[str, list[int]] | None = None, seed: int = 0
    ) -> None:
        """Know the plain output of some request ids; the rest is drawn below `vocab_size`."""
        self._vocab_size = vocab_size
        self._outputs = outputs or {}
        self._random = random.Random(seed)

    def propose(self, context: Context) -> Draft:
        """A tree of 0 to draft_budget nodes per span."""
        trees = [self._tree(span) for span in context.spans]
        return Draft(
            ids=tuple(ids for ids, _ in trees),
            parents=tuple(parents for _, parents in trees),
            drafter=self.name,
        )

    def release(self, request_id: str) -> None: ...

    def _tree(self, span: Span) -> tuple[tuple[int, ...], tuple[int, ...]]:
        draw, sequence = self._random, span.sequence
        known = self._outputs.get(sequence.request.request_id, [])[sequence.num_output :]
        ids: list[int] = []
        parents: list[int] = []
        right, depth = -1, 0
        for node in range(draw.randint(0, span.draft_budget)):
            if depth < len(known) and draw.random() < 0.4:
                parents.append(right)
                ids.append(known[depth])
                right, depth = node, depth + 1
            else:
                parents.append(draw.randint(-1, node - 1))
                ids.append(draw.randrange(self._vocab_size))
        return tuple(ids), tuple(parents)
