"""The mutable state of one running request. Only the scheduler mutates it.

Invariants: 0 <= num_computed < num_tokens while the sequence lives; the pages of `page_table`
cover at least num_computed positions; tokens beyond the prompt are output in order.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from foretoken.types import FinishReason, Request


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
    num_computed: int = 0
    """Positions [0, num_computed) have valid target KV."""
    page_table: list[int] = field(default_factory=list)
    """Page of positions [i * page_size, (i + 1) * page_size)."""
    page_hashes: list[bytes] = field(default_factory=list)
    """Chain hash of each full page that has been computed so far (prefix caching)."""
    state: SequenceState = SequenceState.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached: int = 0
    """Prompt positions found in the prefix cache when first scheduled."""
    num_preemptions: int = 0
    scheduled_at: float | None = None
    first_token_at: float | None = None
    drafted_per_step: list[int] = field(default_factory=list)
    accepted_per_step: list[int] = field(default_factory=list)

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
    def is_decoding(self) -> bool:
        """Whether only the newest token lacks KV, so that a draft can be checked after it."""
        return self.num_computed == len(self.token_ids) - 1 and self.num_output > 0
