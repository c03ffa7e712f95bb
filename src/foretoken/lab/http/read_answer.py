"""A finished HTTP answer to a RequestRecord: texts, token counts, times, acceptance, errors.

Reads both shapes (completions and chat), streamed or whole, from any of the known servers. A stream
is server-sent events (lines `data:`, a blank line between events), each with the time its last byte
arrived. Runs after the answer is there, never while one is timed.

Acceptance has one function per source, or None where it is not there. vLLM and Foretoken answer
`metrics.speculative_decoding`; llama.cpp's `timings` have totals, and per chunk when asked; SGLang
has `spec_tokens_details`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from foretoken.lab.http.timed import Answer
from foretoken.lab.records.results import RequestAcceptance, RequestRecord
from foretoken.types.accepted import histogram_of

_MOST_DRAFTS = 4096


def counts_in(given: Mapping[str, Any]) -> dict[str, int]:
    """What an object counts; null, and what is no whole number, is not told."""
    return {name: value for name, value in given.items() if isinstance(value, int)}


def from_body(metrics: Any) -> RequestAcceptance | None:
    """vLLM's `metrics` object (--per-request-spec-decode-metrics summary or detailed)."""
    found = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(found, dict) or _count(found, "num_draft_tokens") is None:
        return None
    return RequestAcceptance(
        source="body",
        num_drafted=_count(found, "num_draft_tokens") or 0,
        num_accepted=_count(found, "num_accepted_draft_tokens") or 0,
        num_steps=_count(found, "num_spec_steps"),
        histogram=_histogram(found.get("acceptance_histogram")),
        per_step_accepted=_steps(found, "per_step_accepted", "per_step_num_accepted_tokens"),
        per_step_drafted=_steps(found, "per_step_drafted", "per_step_num_draft_tokens"),
    )


def _steps(found: Mapping[str, Any], *names: str) -> tuple[int, ...]:
    given = next((found[name] for name in names if name in found), None)
    return tuple(int(value) for value in given) if isinstance(given, list) else ()


def _histogram(given: Any) -> tuple[int, ...]:
    """A list of counts, or a mapping from accepted drafts to counts."""
    if isinstance(given, list):
        return tuple(int(count) for count in given)
    if not isinstance(given, dict) or not given:
        return ()
    counts = {int(length): int(count) for length, count in given.items()}
    if max(counts) > _MOST_DRAFTS:
        raise ValueError(f"a step of {max(counts)} drafts")
    return tuple(counts.get(j, 0) for j in range(max(counts) + 1))


def _count(found: Mapping[str, Any], *names: str) -> int | None:
    """The first of these fields that is a number."""
    values = (found.get(name) for name in names)
    return next((int(value) for value in values if isinstance(value, int | float)), None)


def from_timings(timings: Sequence[Mapping[str, Any]]) -> RequestAcceptance | None:
    """llama.cpp's `timings`, of every chunk that had them, the last being the totals. With
    timings_per_token they are cumulative, so differences are steps: a chunk that brings drafts is
    one verification. Without them the number of steps is not known."""
    counts = [
        (drafted, _count(t, "draft_n_accepted") or 0)
        for t in timings
        if (drafted := _count(t, "draft_n")) is not None
    ]
    if not counts or counts[-1][0] == 0:
        return None
    drafted, accepted = counts[-1]
    steps = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip([(0, 0), *counts], counts, strict=False)
        if after[0] > before[0]
    ]
    if len(counts) < 2 or len(steps) < 2:
        return RequestAcceptance(source="timings", num_drafted=drafted, num_accepted=accepted)
    return RequestAcceptance(
        source="timing_chunks",
        num_drafted=drafted,
        num_accepted=accepted,
        num_steps=len(steps),
        exact=False,
        histogram=histogram_of([a for _, a in steps]),
        per_step_accepted=tuple(a for _, a in steps),
        per_step_drafted=tuple(d for d, _ in steps),
    )


def from_spec_details(details: Any) -> RequestAcceptance | None:
    """SGLang's `spec_tokens_details` (return_spec_tokens_details)."""
    if not isinstance(details, dict):
        return None
    steps = _count(details, "spec_verify_ct", "verify_count", "num_verify")
    drafted = _count(details, "proposed_drafts", "spec_draft_token_num", "num_draft_tokens")
    accepted = _count(details, "correct_drafts", "spec_accept_token_num", "num_accepted_tokens")
    if drafted is None or accepted is None:
        return None
    histogram = next((details[n] for n in details if "histogram" in n), None)
    return RequestAcceptance(
        source="spec_details",
        num_drafted=drafted,
        num_accepted=accepted,
        num_steps=steps,
        histogram=_histogram(histogram),
    )


def _data_of(frame: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in frame.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


def parse_events(
    pieces: Sequence[tuple[float, bytes]], *, torn: bool = False
) -> tuple[list[tuple[float, dict[str, Any]]], bool]:
    """JSON objects with their arrivals, and whether the stream ended with [DONE]. Of a `torn`
    stream the last event may be cut in the middle, and is left out then. Raises ValueError if an
    event is not a JSON object."""
    found: list[tuple[float, dict[str, Any]]] = []
    events: list[tuple[float, bytes | None]] = []
    rest = b""
    for at, piece in pieces:
        rest += piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        *frames, rest = rest.split(b"\n\n")
        events += [(at, _data_of(frame)) for frame in frames]
    if not torn and pieces:
        events.append((pieces[-1][0], _data_of(rest.strip())))
    for at, data in events:
        if data is None:
            continue
        if data.strip() == b"[DONE]":
            return found, True
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"an event is not an object: {data[:60]!r}")
        found.append((at, value))
    return found, False


@dataclass(slots=True)
class _Reading:
    text: list[str] = field(default_factory=list)
    chunk_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    timings: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    metrics: Any = None
    details: Any = None
    error: str | None = None
    all_have_ids: bool = True
    acceptance: RequestAcceptance | None = None

    def add(self, at: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = f"server: {_message(event['error'])}"
        self.usage = counts_in(event.get("usage") or {}) or self.usage
        self.metrics = event.get("metrics") or self.metrics
        self.details = (event.get("sglext") or {}).get("spec_tokens_details") or self.details
        if isinstance(event.get("timings"), dict):
            self.timings.append(event["timings"])
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            delta = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or delta.get("content") or ""
            text = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
            ids = choice.get("token_ids") or delta.get("token_ids")
            if not text and not ids:
                continue
            if not isinstance(text, str):
                raise TypeError(f"a text that is none: {text!r}"[:80])
            self.text.append(text)
            self.chunk_s.append(at)
            if isinstance(ids, list):
                self.chunk_tokens.append(len(ids))
            else:
                self.all_have_ids = False


def read_answer(
    record: RequestRecord, answer: Answer, start_s: float, *, keep_text: bool = False
) -> RequestRecord:
    """`record` with everything that `answer` says; mistakes of the server become its `error`. Times
    count from `start_s` on the monotonic clock."""
    reading = _Reading()
    if answer.status >= 400:
        kind = "refused" if answer.status < 500 else "server"
        error: str | None = f"{kind}: HTTP {answer.status}: {error_text(answer.body)}"
    else:
        error = _read_body(reading, answer) or reading.error
    if error is None and not reading.chunk_s:
        error = "protocol: an answer without text"
    text = "".join(reading.text)
    tokens = reading.chunk_tokens if reading.all_have_ids else []
    chunk_s = [at - start_s for at in reading.chunk_s]
    output_tokens = reading.usage.get("completion_tokens")
    return replace(
        record,
        sent_s=answer.sent_s - start_s,
        first_s=chunk_s[0] if chunk_s else None,
        last_s=chunk_s[-1] if chunk_s else None,
        end_s=answer.end_s - start_s,
        chunk_s=tuple(round(at, 6) for at in chunk_s),
        chunk_tokens=tuple(tokens),
        prompt_tokens=reading.usage.get("prompt_tokens"),
        output_tokens=output_tokens if output_tokens is not None else sum(tokens) or None,
        finish_reason=reading.finish_reason,
        error=error,
        text=text if keep_text else None,
        text_hash=hashlib.sha256(text.encode()).hexdigest()[:16] if text else None,
        acceptance=reading.acceptance if error is None else None,
    )


def _read_body(reading: _Reading, answer: Answer) -> str | None:
    """What of the answer is not as it should be; None: nothing."""
    streamed, broken = "event-stream" in dict(answer.headers).get("content-type", ""), answer.broken
    try:
        if streamed:
            events, done = parse_events(answer.pieces, torn=broken is not None)
            for at, event in events:
                reading.add(at, event)
            if broken is None and not (done or reading.finish_reason or reading.error):
                return "truncated: the stream ended without a finish reason"
        elif broken is None:
            reading.add(answer.end_s, json.loads(answer.body))
        found = from_body(reading.metrics) or from_spec_details(reading.details)
        reading.acceptance = found or from_timings(reading.timings)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        return f"protocol: not what an OpenAI-style server sends ({error})"[:300]
    return None if broken is None else str(broken)


def error_text(body: bytes) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace")
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(value: Any) -> str:
    text = value.get("message") if isinstance(value, dict) else None
    return str(text if text is not None else value)[:300]
