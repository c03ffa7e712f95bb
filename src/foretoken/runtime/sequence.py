"""The mutable state of one running request. Only the scheduler mutates it.

Invariants: 0 <= num_computed < num_tokens while the sequence lives; the pages of `page_table`
cover at least num_computed positions; tokens beyond the prompt are output in order; token ids
are only ever appended, so the names in `page_hashes` stay right.
"""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self

from foretoken.kv.window_pages import InWindow
from foretoken.types import FinishReason, Logprob, Request


class SequenceState(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """Token ids, how many of them have KV, and the pages that hold it."""

    request: Request
    token_ids: list[int]
    """Prompt and output."""
    num_prompt: int
    order: int = 0
    """Number of the request among all that the scheduler was given."""
    num_computed: int = 0
    """Positions [0, num_computed) have valid target KV."""
    page_table: list[int] = field(default_factory=list)
    """Page of positions [i * page_size, (i + 1) * page_size)."""
    in_window: InWindow = field(default_factory=InWindow)
    """Places of page_table with contents in layers with a window, where others have none."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chain hash of the first full pages of token_ids, as far as it was needed so far."""
    num_published: int = 0
    """Pages of page_table that the prefix cache was offered or came from it."""
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    """Prompt positions found in the prefix cache when first scheduled."""
    num_preemptions: int = 0
    prompt_logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    """Logprobs of prompt positions 1, 2, ... computed so far; emptied when they are emitted."""
    scheduled_at: float | None = None
    first_token_at: float | None = None
    drafted_per_step: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)
    drafter_per_step: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, order: int = 0) -> Self:
        """A new sequence of `request`, nothing computed: not even the output that it resumes."""
        token_ids = [*request.prompt_token_ids, *request.resumed_ids]
        num_prompt = len(request.prompt_token_ids)
        return cls(request=request, token_ids=token_ids, num_prompt=num_prompt, order=order)

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return len(self.token_ids)

    @property
    def num_output(self) -> int:
        """Output tokens so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        """A copy of the output tokens."""
        return self.token_ids[self.num_prompt :]

    @property
    def was_begun(self) -> bool:
        """Whether it broke off, here or in another engine, and is to be computed again."""
        return self.num_preemptions > 0 or bool(self.request.resumed_ids)

    @property
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks KV, so that a draft can be checked after it."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_output > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt positions must all be computed for their logits: none emitted yet."""
        return self.request.params.prompt_logprobs is not None and self.num_output == 0
