"""What every proposer is: one question per step, one answer, no reach into the engine."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar

from foretoken.control.plan import NO_DRAFTS, DraftPlan
from foretoken.models.tensors import Draft
from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.types import DraftingTime


@dataclass(frozen=True, slots=True)
class Context:
    """What a proposer may look at. The sequences of the spans are read-only to it."""

    spans: tuple[Span, ...]
    """The step's spans. A span with draft_budget 0 wants no draft; its pages already reserve
    room for draft_budget tokens after the committed ones."""
    plan: DraftPlan = NO_DRAFTS
    """What was decided for the step as a whole; budgets already follow from it."""

    @property
    def wanted(self) -> list[int]:
        """Indices of the spans that want a draft."""
        return [i for i, span in enumerate(self.spans) if span.draft_budget > 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposerSettings:
    """What a proposer of the user's own is constructed with (method custom_class)."""

    vocab_size: int
    """Drafts are ids below this."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output together."""
    num_speculative_tokens: int
    """Most drafts per span: no budget is above it."""


class Proposer(ABC):
    """Drafts tokens. Whether a token is dropped may depend only on what was known before it.

    Every method writes two members, `propose` and `release`, and its `name`. The others have an
    answer that holds for whoever keeps nothing of sequences:

    - for control: `looks_up`, `drafts_blocks`, `times`; and where there are keys and values of its
      own `num_missing`, `max_window` and `feed`, which say what catching up takes and do it;
    - shown to users: `num_bytes`, `prefix_tokens`.

    None is for trees: they are in the `Draft`, and `drafting.py` makes them of a drafter's steps.
    """

    name: str
    """The word the user types."""
    looks_up: ClassVar[bool] = False
    """Whether drafts cost next to nothing and follow from known text alone, with no draw: such a
    draft may be made, looked at, and set aside for another drafter's."""
    times: tuple[DraftingTime, ...] = ()
    """What drafters did in the last step, where it asks several and times them."""
    drafts_blocks: bool = False
    """Whether its drafts are masks of a block, which one pass fills in."""

    @abstractmethod
    def propose(self, context: Context) -> Draft:
        """At most draft_budget tokens for each span; costs nothing when no span wants any."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps beside weights and KV, about."""
        return 0

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """Tokens of all sequences when it was first fed of them, and those that others had fed."""
        return 0, 0

    @property
    def max_window(self) -> int:
        """Most tokens that `feed` may take for a whole sequence; 0: it has to know all of them."""
        return 0

    def num_missing(self, sequence: Sequence) -> int:
        """Tokens of a decoding sequence that it would be fed before its first draft, one or a few
        if it drafted in the last step; 0: none, or it cannot draft for the sequence yet."""
        return 0

    def feed(self, sequences: Seq[Sequence], most_rows: int, window: int | None = None) -> int:
        """Catch up with decoding sequences, without drafting, in one pass; rows that it had.

        Args:
            sequences: as many as fit a pass are served, in order.
            most_rows: of each sequence.
            window: take so many of the latest tokens for the whole sequence where much more than
                that is missing; later drafts go on from there. What is drafted is another guess
                then, and the output is the same.
        """
        return 0
