"""The JSON of answers that completions and chat completions share: usage, logprobs, metrics.

Builds dictionaries from events. Their long lists are `LateList`s, made when they are written.
Knows no engine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from foretoken.control.report.explain import of_request
from foretoken.server.requests.generation import Event, Generation
from foretoken.server.schemas import GenerationBody
from foretoken.server.transport.events import LateList
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Logprob, RequestMetrics
from foretoken.types.accepted import acceptance_rate

TokenText = Callable[[int], str]


class TokenTexts:
    """The text of single tokens, remembered."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        """Without a tokenizer, a token's text is its number."""
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token_id: int) -> str:
        """The token alone as text, special tokens included."""
        text = self._known.get(token_id)
        if text is None:
            if self._tokenizer is None:
                text = f"token_id:{token_id}"
            else:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._known[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """What the token stands for; those of an output, joined, are its text."""
        if self._tokenizer is None:
            return self(token_id).encode()
        return self._tokenizer.token_bytes(token_id)


class Tally:
    """Counts over all choices of one request, for its usage and its metrics."""

    def __init__(self, generation: Generation) -> None:
        """Nothing generated yet."""
        self._generation = generation
        self._num_resumed = sum(len(one.output_ids) for one in generation.order.resume or ())
        self.num_completion = 0
        """Tokens that were generated here."""
        self.num_cached = 0
        self.ends: list[RequestMetrics] = []

    def add(self, event: Event) -> None:
        """Count one event."""
        self.num_completion += event.token_id is not None
        if event.metrics is not None:
            self.ends.append(event.metrics)
            self.num_cached += event.metrics.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage as it stands; what another server has written counts as output."""
        prompt = self._generation.num_prompt_tokens
        completion = self._num_resumed + self.num_completion
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": min(self.num_cached, prompt)},
            "completion_tokens_details": self._details(),
        }

    def _details(self) -> dict[str, Any] | None:
        """Of a request with a prediction: its drafted tokens that were and were not accepted."""
        if self._generation.order.params.prediction is None:
            return None
        steps = [
            (drafted, accepted)
            for end in self.ends
            for drafted, accepted, drafter in zip(
                end.drafted_per_step, end.accepted_per_step, end.drafter_per_step, strict=True
            )
            if drafter == "prediction"
        ]
        accepted_tokens = sum(accepted for _, accepted in steps)
        return {
            "accepted_prediction_tokens": accepted_tokens,
            "rejected_prediction_tokens": sum(drafted for drafted, _ in steps) - accepted_tokens,
        }

    def metrics(self) -> dict[str, Any] | None:
        """The `metrics` field: None unless the server reports it; null inside for n > 1."""
        level = self._generation.state.config.per_request_metrics
        if level == "none":
            return None
        if len(self.ends) != 1 or self._generation.order.num_choices != 1:
            return {"speculative_decoding": None}
        spec = self._generation.state.engine.engine.parts.config.user.speculative_config
        most = spec.num_speculative_tokens if spec is not None else 0
        return {
            "speculative_decoding": speculation(self.ends[0], most, level == "detailed"),
            "why": of_request(self.ends[0], self.num_completion, self._why_plain()),
        }

    def _why_plain(self) -> str:
        """Why steps of the request did not draft: the first that forbids it, or control."""
        parts = self._generation.state.engine.engine.parts
        own, operator = self._generation.order.params.own_policy, parts.controller.live.speculation
        if own is not None and not own.enabled:
            return "the request asked for none"
        if not operator.enabled:
            return "the operator turned drafts off"
        if parts.controller.journal is None:
            return "nothing drafts for this model here"
        return parts.controller.journal.why_plain(operator.drafter if own is None else own.drafter)


def speculation(metrics: RequestMetrics, num_spec_tokens: int, detailed: bool) -> dict[str, Any]:
    """What speculation did for one request, in vLLM's names."""
    drafted, accepted = metrics.drafted_per_step, metrics.accepted_per_step
    histogram = enumerate(metrics.acceptance_histogram)
    found: dict[str, Any] = {
        "mean_acceptance_length": metrics.acceptance_length,
        "draft_acceptance_rate": acceptance_rate(sum(accepted), sum(drafted)),
        "acceptance_histogram": {str(length): count for length, count in histogram if count},
        "num_spec_steps": len(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": num_spec_tokens,
    }
    if detailed:
        found["per_step_drafted"] = list(drafted)
        found["per_step_accepted"] = list(accepted)
        found["per_step_drafter"] = list(metrics.drafter_per_step)
    return found


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry; impossible tokens get -9999, as in vLLM."""
    return logprob if math.isfinite(logprob) else -9999.0


Row = tuple[int, Mapping[int, Logprob] | None]
"""A token and what was probable where it stands; None at the first of a prompt."""


def completion_logprobs(
    rows: Sequence[Row], text_of: TokenText, offsets: Iterator[int], count: int
) -> dict[str, Any]:
    """Logprobs of a completion's tokens, whose texts start at `offsets`."""
    return {
        "text_offset": LateList(offsets),
        "token_logprobs": LateList(
            None if row is None else finite(row[token_id].logprob) for token_id, row in rows
        ),
        "tokens": LateList(text_of(token_id) for token_id, _ in rows),
        "top_logprobs": LateList(
            None
            if row is None
            else {text_of(i): finite(e.logprob) for i, e in islice(row.items(), count + 1)}
            for _, row in rows
        ),
    }


def chat_logprobs(event: Event, text_of: TokenTexts, count: int) -> dict[str, Any]:
    """Logprobs of one token of a chat completion."""
    assert event.token_id is not None and event.logprobs is not None, event
    row = event.logprobs
    best = sorted(row.items(), key=lambda pair: pair[1].rank)[:count]
    return {
        **_entry(event.token_id, row[event.token_id], text_of),
        "top_logprobs": [_entry(i, entry, text_of) for i, entry in best],
    }


def _entry(token_id: int, entry: Logprob, text_of: TokenTexts) -> dict[str, Any]:
    given = list(text_of.bytes_of(token_id))
    return {"token": text_of(token_id), "logprob": finite(entry.logprob), "bytes": given}


def asked_for(
    body: GenerationBody,
    events: Sequence[Event],
    prompt_ids: Sequence[int] | None,
    text_of: TokenTexts,
) -> dict[str, Any]:
    """What vLLM and we say of a choice beyond OpenAI's fields, as far as `body` asks for it.

    Args:
        body: of the request.
        events: what the choice, or the chunk of it, is made of.
        prompt_ids: where it begins; None: what the prompt had has been said.
        text_of: the texts of tokens.
    """
    found: dict[str, Any] = {}
    if body.return_token_ids:
        found["token_ids"] = [e.token_id for e in events if e.token_id is not None]
        if prompt_ids is not None:
            found["prompt_token_ids"] = LateList(prompt_ids)
    if body.token_sources:
        found["tokens"] = LateList(map(token_entry, events))
        if events[-1].metrics is not None:
            found["times"] = server_times(events[-1].metrics)
    if prompt_ids is not None and body.prompt_logprobs is not None:
        found["prompt_logprobs"] = LateList(
            None
            if row is None
            else {
                str(i): {"logprob": finite(e.logprob), "rank": e.rank, "decoded_token": text_of(i)}
                for i, e in row.items()
            }
            for row in events[0].prompt_logprobs or ()
        )
    return found


def server_times(metrics: RequestMetrics) -> dict[str, float]:
    """When things happened to a choice on the server's clock: seconds since the request came."""
    return {
        "queued_s": metrics.queued_s,
        "first_token_s": metrics.first_token_s,
        "finished_s": metrics.finished_s,
    }


def token_entry(event: Event) -> dict[str, Any]:
    """One token with its provenance: where in its step it stood, who drafted it, how probable."""
    probability = None
    if event.logprobs is not None and event.token_id is not None:
        probability = math.exp(event.logprobs[event.token_id].logprob)
    return {
        "id": event.token_id,
        "text": event.text,
        "source": event.source,
        "drafter": event.drafter,
        "position": event.position,
        "probability": probability,
    }
