"""Turning what the verifier found for one span into the sequence's new state and an `Output`.

Owns the arithmetic of committed and computed tokens, prompt logprobs over chunks, and the
metrics of a request. Pages and queues are the scheduler's; how tokens were chosen, the
verifier's.
"""

from collections.abc import Sequence as ReadOnly
from typing import Protocol

from foretoken.runtime.batch import Span
from foretoken.runtime.sequence import Sequence
from foretoken.runtime.stopping import Ending
from foretoken.types import Logprob, Output, RequestMetrics, TokenSource


class SpanResult(Protocol):
    """What was found for one span; see `foretoken.runtime.verifier`."""

    @property
    def new_ids(self) -> tuple[int, ...]:
        """Accepted drafts and one more token; empty if the span does not sample."""

    @property
    def num_accepted(self) -> int:
        """Leading new ids that were drafts."""

    @property
    def num_drafted(self) -> int:
        """Drafts that were checked."""

    @property
    def sources(self) -> tuple[TokenSource, ...]:
        """One per new id."""

    @property
    def logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        """One per new id, if asked for."""

    @property
    def prompt_logprobs(self) -> tuple[dict[int, Logprob], ...] | None:
        """One per prompt row of the span, if asked for."""

    @property
    def valid(self) -> bool:
        """Whether the new ids are what the model would say."""


class StepResult(Protocol):
    """What was found for a batch, span by span."""

    @property
    def spans(self) -> ReadOnly[SpanResult | None]:
        """None: a span without any rows of logits."""


def advance(span: Span, result: SpanResult | None) -> None:
    """Count the committed tokens of the span as computed and keep its prompt logprobs."""
    sequence = span.sequence
    assert sequence.num_computed == span.start, (sequence.num_computed, span.start)
    sequence.num_computed = span.start + span.length
    if span.wants_prompt_logprobs:
        found = result.prompt_logprobs if result is not None else None
        given = len(found) if found is not None else 0
        assert given == span.prompt_rows, (given, span.prompt_rows)
        sequence.prompt_logprobs.extend(found or ())


def append(span: Span, result: SpanResult, ending: Ending, now: float) -> None:
    """Append the kept new tokens; while the sequence lives, the newest has no KV yet."""
    sequence, num_keep = span.sequence, ending.num_keep
    assert result.num_accepted < len(result.new_ids), (result.num_accepted, len(result.new_ids))
    accepted = min(result.num_accepted, num_keep)
    sequence.token_ids.extend(result.new_ids[:num_keep])
    sequence.num_computed += accepted
    sequence.finish_reason, sequence.stop_reason = ending.finish_reason, ending.stop_reason
    if sequence.first_token_at is None:
        sequence.first_token_at = now
    if result.num_drafted:
        sequence.drafted_per_step.append(result.num_drafted)
        sequence.accepted_per_step.append(accepted)
        sequence.drafter_per_step.append(span.drafter)
    alive = ending.finish_reason is None
    assert not alive or sequence.is_decoding, (sequence.num_computed, sequence.num_tokens)


def output_of(span: Span, result: SpanResult, ending: Ending, now: float) -> Output:
    """The step's output of a span whose tokens were just appended."""
    sequence, num_keep = span.sequence, ending.num_keep
    prompt_logprobs = None
    if span.wants_prompt_logprobs:
        prompt_logprobs = (None, *sequence.prompt_logprobs)
        assert len(prompt_logprobs) == sequence.num_prompt, (
            len(prompt_logprobs),
            sequence.num_prompt,
        )
        sequence.prompt_logprobs = []
    finished = ending.finish_reason is not None
    return Output(
        request_id=sequence.request.request_id,
        new_token_ids=result.new_ids[:num_keep],
        sources=result.sources[:num_keep],
        drafters=_drafters(span, result)[:num_keep],
        logprobs=result.logprobs[:num_keep] if result.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
        metrics=metrics_of(sequence, now) if finished else None,
        valid=result.valid,
    )


def metrics_of(sequence: Sequence, now: float) -> RequestMetrics:
    """What happened to a sequence that ends `now`; what never happened took until now."""
    arrival = sequence.request.arrival
    scheduled, first = sequence.scheduled_at, sequence.first_token_at
    return RequestMetrics(
        queued_s=(scheduled if scheduled is not None else now) - arrival,
        first_token_s=(first if first is not None else now) - arrival,
        finished_s=now - arrival,
        num_preemptions=sequence.num_preemptions,
        num_cached_tokens=sequence.num_cached,
        drafted_per_step=tuple(sequence.drafted_per_step),
        accepted_per_step=tuple(sequence.accepted_per_step),
        drafter_per_step=tuple(sequence.drafter_per_step),
    )


def _drafters(span: Span, result: SpanResult) -> tuple[str | None, ...]:
    """Who proposed each new id: the span's drafter where it was accepted."""
    return (*((span.drafter,) * result.num_accepted), None)
