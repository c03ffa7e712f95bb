"""Device-side values of one step: what a model is given, what it returns, what was drafted.

Shape letters: T tokens of the step, B spans, R rows of logits, V vocabulary, D hidden size,
P pages of the longest span, K drafts of all spans together.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from foretoken.ops.attention.base import SpanWindow


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLayout:
    """Where one span lies: positions [start, start + num_tokens) of a paged sequence."""

    start: int
    num_tokens: int
    page_table: list[int]
    """Pages of the sequence; read only, covers at least start + num_tokens positions."""
    paths: tuple[tuple[int, ...], ...] | None = None
    """Paths of a tree of drafts, as in `SpanWindow`: keys and values lie in the order of the span,
    but a token stands at start + its depth. None: a chain."""
    known: int = 0
    """Tokens of the tree that were run before and lie between `start` and these; paths count them
    too. Of a chain: 0."""

    @property
    def first(self) -> int:
        """Place of the first token."""
        return self.start + self.known

    @property
    def window(self) -> SpanWindow:
        """What attention needs to know."""
        return SpanWindow(self.start, self.num_tokens, self.page_table, self.paths, self.known)

    @property
    def positions(self) -> Sequence[int]:
        """Position of each token."""
        if self.paths is None:
            return range(self.start, self.start + self.num_tokens)
        return [self.start + len(path) - 1 for path in self.paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Where drafts of a rollout end early: `foretoken.proposers.chain` says why."""

    least_sure: float
    """A draft is made if its chance is at least this."""
    least: int
    """Drafts of each in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """Several draft tokens of B sequences to be chosen one after the other."""

    steps: int
    """Tokens of each sequence."""
    rows: bytes
    """How each is chosen: `foretoken.ops.drawing.pack_rows`, step by step, B rows each."""
    keeps_logits: bool
    """Whether the logits are wanted too."""
    best: bool
    """Whether every one is the best by the raw logits."""
    stop: StopRule | None = None
    """None: all of them are drafted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """What became of a plan."""

    ids: list[list[int]]
    """Per sequence; all equally many, perhaps fewer than planned, but where a rule ended them."""
    logits_KV: Tensor | None
    """float32, step by step, B rows each, also where a rule ended the tokens; None unless they are
    kept."""
    undecided_BV: Tensor | None = None
    """float32 logits after those tokens, valid until the next rollout, where the choice is left to
    the caller (of those that did not end); None: all that was planned was drafted, or ended."""
    stream_BD: Tensor | None = None
    """The newest outputs of a head that continues them, valid until the next rollout."""
    going: list[int] | None = None
    """The sequences that the plan's rule did not end; None: it has no rule."""


class ChainWatch(Protocol):
    """Goes on while a device drafts chains."""

    def launched(self, tokens_KB: Tensor) -> None:
        """Chains of B sequences were launched: int32 tokens that are there for all that is launched
        from now on, and are not read yet."""

    def read(self, ids: list[list[int]]) -> None:
        """They are these."""


CHAIN_WATCH: Final[ContextVar[ChainWatch | None]] = ContextVar("CHAIN_WATCH", default=None)
"""Who is told of chains that are launched in this context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """One forward: ragged spans laid end to end."""

    tokens_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, position of each token in its sequence."""
    slots_T: Tensor | slice
    """Where keys and values are written: int64 page * page_size + offset, or neighbours."""
    spans: tuple[SpanLayout, ...]
    rows_R: Tensor | None
    """int64 indices into T of the rows that need logits; None means every row."""


class StepDraws(NamedTuple):
    """How tokens are drawn in the step, where nothing edits their logits."""

    rows: bytes
    """Of each row of logits: `ops.drawing.pack_rows`."""
    follows: bool = False
    """Whether the step's token ids are rows of the step before: the tokens that were drawn there
    are meant, which need not be known here."""
    drafts_KB: Tensor | None = None
    """int32, the tokens of all places but the first of each of B spans, which have K + 1 places:
    where the device has them, they need not be known here either."""


class Arrived(NamedTuple):
    """What a device gives back of a step."""

    tokens_R: list[int]
    experts_read: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Logits of the rows asked for."""

    logits_RV: Tensor
    """float32."""
    hidden_RD: Tensor
    """Final hidden state (after the last norm) of the same rows, in the model's dtype."""
    chosen_R: list[int] | None = None
    """The token of each row, where tokens were drawn on the device; None: they were not."""
    experts_read: float = 0.0
    """Experts of a layer that were read, on average; 0: not counted, or there are none."""
    wait: Callable[[], Arrived] | None = None
    """Waits for these; None: they are there."""

    def arrived(self) -> Self:
        """The same with its tokens, which are waited for."""
        if self.wait is None:
            return self
        tokens_R, experts_read = self.wait()
        return replace(self, chosen_R=tokens_R, experts_read=experts_read, wait=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """Proposed tokens of one step, one tuple per span of the batch (empty: nothing drafted)."""

    ids: tuple[tuple[int, ...], ...]
    probs_KV: Tensor | None = None
    """float32 distribution each token was drawn from, spans in order; None: one-hot drafts. In a
    tree, given its elder siblings."""
    parents: tuple[tuple[int, ...] | None, ...] | None = None
    """Per span, for each token the index of the one it comes after, -1 for the newest committed
    one, parents first; None: each comes after the one before it."""
    drafter: str = "none"
    """Name of the drafter, for provenance and metrics."""
    drafters: tuple[str, ...] | None = None
    """One name per span, where several drafters had a part; None: `drafter` for all."""
    one_hot: tuple[bool, ...] | None = None
    """Per span, whether its drafts were not drawn, though there are rows for them in `probs_KV`
    (with all mass on each); None: the same for all, one-hot without `probs_KV`."""
    promises: tuple[float | None, ...] | None = None
    """Per span, how many of its drafts the drafter expects to be accepted, each judged before it
    was drawn; None: it has no opinion."""

    @classmethod
    def empty(cls, num_spans: int) -> "Draft":
        """No drafts for any span."""
        return cls(ids=((),) * num_spans)

    def over(self, num_spans: int) -> "Draft":
        """The same for a step with more spans, which stand behind these and have no drafts."""
        more = num_spans - len(self.ids)
        assert more >= 0, (num_spans, len(self.ids))
        return replace(
            self,
            ids=self.ids + ((),) * more,
            parents=None if self.parents is None else self.parents + (None,) * more,
            drafters=None if self.drafters is None else self.drafters + (self.drafter,) * more,
            one_hot=None if self.one_hot is None else self.one_hot + (False,) * more,
            promises=None if self.promises is None else self.promises + (None,) * more,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Whose draft each span has."""
        return (self.drafter,) * len(self.ids) if self.drafters is None else self.drafters

    def is_one_hot(self, index: int) -> bool:
        """Whether a span's drafts come without a distribution of their own."""
        return self.probs_KV is None or (self.one_hot is not None and self.one_hot[index])

    def check(self) -> None:
        """Assert that probabilities, names, parents and ids belong together."""
        assert len(self.names) == len(self.ids), (len(self.names), len(self.ids))
        for ids, parents in zip(self.ids, self.parents or (), strict=self.parents is not None):
            assert parents is None or len(parents) == len(ids), (parents, ids)
        if self.probs_KV is not None:
            total = sum(len(ids) for ids in self.ids)
            assert self.probs_KV.shape[0] == total, (self.probs_KV.shape[0], total)
            assert self.probs_KV.dtype == torch.float32, self.probs_KV.dtype
