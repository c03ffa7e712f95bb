"""From what the verifier found for one span to the sequence's new state and its `Output`.

Owns where a sequence ends (stop ids, stop strings, max_tokens, the context limit), the arithmetic
of committed and computed tokens, prompt logprobs over chunks, and the metrics of a request. A stop
beats a length limit at the same token, and a stop string beats a stop id that comes after it. Pages
and queues are the scheduler's; how tokens were chosen, the verifier's; text, the passed function's.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from foretoken.runtime.batch import Span, SpanVerification
from foretoken.runtime.sequence import Sequence
from foretoken.text.tokenizer import StopMatch
from foretoken.types import FinishReason, Output, RequestMetrics

StopFinder: TypeAlias = Callable[[str, tuple[int, ...]], StopMatch | None]
"""(request id, new ids) -> the first match. Called once per step and request with the new ids
that make text: those kept so far, without a final stop id; never with none. It is its affair
that stop strings count only after min_tokens."""


class Ending(NamedTuple):
    """How many of the new tokens stay, and whether and why the sequence ends with them."""

    num_keep: int
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


def never_stops(request_id: str, new_ids: tuple[int, ...]) -> StopMatch | None:
    """A `StopFinder` for requests without stop strings."""
    return None


def _first_stop_id(sequence: Sequence, new_ids: tuple[int, ...]) -> int | None:
    """Index of the first new token that is a stop id and not before min_tokens."""
    stop_ids = sequence.request.stop_ids
    if not stop_ids:
        return None
    # The token at this index is number `num_output + index + 1` of the output.
    earliest = sequence.request.params.min_tokens - sequence.num_output - 1
    for index, token in enumerate(new_ids):
        if token in stop_ids and index >= earliest:
            return index
    return None


def find_ending(
    sequence: Sequence, new_ids: tuple[int, ...], max_len: int, find_stop_string: StopFinder
) -> Ending:
    """Decide how many of `new_ids` the sequence keeps. `sequence` is not changed.

    `stop_reason` is the stop string, or the id if it is one of stop_token_ids, or None for EOS.
    """
    request = sequence.request
    # A step may give more tokens than there is room for: drafts are counted before it is known how
    # many of them stay.
    room = min(request.max_tokens - sequence.num_output, max_len - sequence.num_tokens)
    assert room > 0, f"{request.request_id} has room for {room} tokens"
    ending = Ending(len(new_ids))
    if len(new_ids) >= room:
        ending = Ending(room, FinishReason.LENGTH)
    # The stop that comes first in the text wins, whatever ended the step: ids are searched among
    # the tokens that stay, strings in the text before the stop id, which makes no text itself.
    textual = new_ids[: ending.num_keep]
    index = _first_stop_id(sequence, textual)
    if index is not None:
        token, textual = new_ids[index], new_ids[:index]
        named = token in (request.params.stop_token_ids or ())
        ending = Ending(index + 1, FinishReason.STOP, token if named else None)
    match = find_stop_string(request.request_id, textual) if textual else None
    if match is not None:
        assert 1 <= match.num_keep <= len(textual), (match.num_keep, len(textual))
        ending = Ending(match.num_keep, FinishReason.STOP, match.stop)
    return ending


def advance(span: Span, result: SpanVerification | None) -> None:
    """Count the committed tokens of the span as computed and keep its prompt logprobs."""
    sequence = span.sequence
    assert sequence.num_computed == span.start, (sequence.num_computed, span.start)
    sequence.num_computed = span.start + span.length
    # A long prompt is computed in chunks: its logprobs are collected until the last one.
    if span.wants_prompt_logprobs:
        found = result.prompt_logprobs if result is not None else None
        given = len(found) if found is not None else 0
        assert given == span.prompt_rows, (given, span.prompt_rows)
        sequence.prompt_logprobs.extend(found or ())


def append(span: Span, result: SpanVerification, ending: Ending, now: float) -> None:
    """Append the kept new tokens; while the sequence lives, the newest has no KV yet."""
    sequence, num_keep = span.sequence, ending.num_keep
    assert result.num_accepted < len(result.new_ids), (result.num_accepted, len(result.new_ids))
    # The step ran the accepted drafts through the model, so they have KV already. The last new
    # token is the target's own: it was only just chosen, and is what the next step begins with.
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


def output_of(span: Span, result: SpanVerification, ending: Ending, now: float) -> Output:
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


def _drafters(span: Span, result: SpanVerification) -> tuple[str | None, ...]:
    """Who proposed each new id: the span's drafter where it was accepted."""
    return (*((span.drafter,) * result.num_accepted), None)
