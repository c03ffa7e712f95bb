"""What comes back: new tokens of a step, finished outputs in vLLM's shape, and counts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from foretoken.types.accepted import acceptance_length, histogram_of


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words; `abort` and `error` as in vLLM."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenSource(StrEnum):
    """Where an output token came from."""

    TARGET = "target"
    """Plain decoding: no draft was checked in that step."""
    ACCEPTED = "accepted"
    """A draft token that the target agreed with."""
    RECOVERED = "recovered"
    """The target's own token where the first draft token was rejected."""
    BONUS = "bonus"
    """The target's extra token after all drafts of a step were accepted."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one place; rank 1 is the best."""

    logprob: float
    rank: int
    decoded_token: str | None = None


class DraftingTime(NamedTuple):
    """What one drafter did in a step."""

    name: str
    sequences: int
    """For which it was asked."""
    depth: int
    """The longest of its drafts; levels of the deepest of its trees."""
    num_drafts: int
    """All of its draft tokens."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """What one engine step did; durations in seconds."""

    num_sequences: int
    num_tokens: int
    """Rows of the target's forward, prompt tokens included."""
    num_drafts: int
    """Sequences that had a draft checked."""
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    num_output_tokens: int
    num_waiting: int
    drafting_s: float
    verifying_s: float
    total_s: float
    between_s: float = 0.0
    """From the end of the step before, where that left something to do: handing over its tokens,
    learning from it, waiting for other threads."""
    num_sampled: int = 0
    """Sequences that got at least one token."""
    drafters: tuple[DraftingTime, ...] = ()
    """Drafters that were asked."""
    experts_read: float = 0.0
    """Experts of a layer that the target read, on average; 0: not counted, or it has none."""

    @property
    def busy_s(self) -> float:
        """What requests wait for because of this step: it, and what was done before it began."""
        return self.between_s + self.total_s

    @property
    def num_prefilled(self) -> int:
        """Prompt tokens computed."""
        return self.num_tokens - self.num_draft_tokens - self.num_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """What happened to one request; times in seconds since its arrival."""

    queued_s: float
    first_token_s: float
    finished_s: float
    num_preemptions: int
    num_cached_tokens: int
    drafted_per_step: tuple[int, ...] = ()
    accepted_per_step: tuple[int, ...] = ()
    drafter_per_step: tuple[str, ...] = ()
    """Whose drafts those were."""

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """How many verifications accepted 0, 1, 2, ... drafts."""
        return histogram_of(self.accepted_per_step)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per verification with a draft, the recovered or bonus token included."""
        return acceptance_length(sum(self.accepted_per_step), len(self.accepted_per_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens of one request after one step, and its end if it ended."""

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    text: str = ""
    """New text that later tokens cannot take back."""
    text_pieces: tuple[str, ...] = ()
    """The same text, split as it became final: one piece per new token (an end without a new
    token may have one), exactly what plain decoding would have given step by step."""
    sources: tuple[TokenSource, ...] = ()
    drafters: tuple[str | None, ...] = ()
    """Of each new token the drafter that proposed it; None: it was not an accepted draft."""
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    refused: str | None = None
    """With an error that is the request's own fault: the parameter, such as a grammar too large."""
    metrics: RequestMetrics | None = None
    """Given with the finish reason."""
    valid: bool = True
    """False: drafts were kept whatever they are (`synthetic`); only good for measuring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One finished (or growing) continuation, shaped as vLLM's."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    sources: tuple[TokenSource, ...] = ()
    """Provenance of each token."""
    drafters: tuple[str | None, ...] = ()
    """Name of the drafter of each accepted draft; None elsewhere."""
    metrics: RequestMetrics | None = None
    valid: bool = True
    """False: not the model's output, but that of a measurement (`synthetic`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its continuations, shaped as vLLM's."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool = True
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    error: str | None = None
    """Why an output ended with finish reason `error`: the first of them, if there are several. Such
    an output has the tokens and the text that it had got so far."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    valid: bool = True
    """Whether all outputs are."""
