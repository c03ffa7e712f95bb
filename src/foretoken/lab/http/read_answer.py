"""A finished HTTP answer to a RequestRecord: texts, token counts, times, acceptance, errors.

Reads both shapes (completions and chat), streamed or whole, from any of the known servers. A stream
is server-sent events (lines `data:`, a blank line between events), each with the time its last byte
arrived. Runs after the answer is there, never while one is timed.

Acceptance has one function per source, or None where it is not there. vLLM and Foretoken answer
`metrics.speculative_decoding`; llama.cpp's `timings` have totals, and per chunk when asked; SGLang
has `spec_tokens_details`; with token ids per chunk the steps of any server show, unless chunks were
merged on their way.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.lab.http.timed import Answer, TransportError
from foretoken.lab.records.results import RequestAcceptance, RequestRecord


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
        per_step_accepted=_steps(found, "accepted"),
        per_step_drafted=_steps(found, "drafted"),
    )


def _steps(found: Mapping[str, Any], what: str) -> tuple[int, ...]:
    words = {"accepted": "accepted", "drafted": "draft"}
    names = (f"per_step_{what}", f"per_step_num_{words[what]}_tokens")
    given = next((found[name] for name in names if name in found), None)
    return tuple(int(value) for value in given) if isinstance(given, list) else ()


def _histogram(given: Any) -> tuple[int, ...]:
    """A list of counts, or a mapping from accepted drafts to counts."""
    if isinstance(given, list):
        return tuple(int(count) for count in given)
    if not isinstance(given, dict) or not given:
        return ()
    counts = {int(length): int(count) for length, count in given.items()}
    return tuple(counts.get(j, 0) for j in range(max(counts) + 1))


def _count(found: Mapping[str, Any], name: str) -> int | None:
    value = found.get(name)
    return int(value) if isinstance(value, int | float) else None


def from_timings(timings: Sequence[Mapping[str, Any]]) -> RequestAcceptance | None:
    """llama.cpp's `timings`, of every chunk that had them, the last being the totals.

    With timings_per_token they are cumulative, so differences are steps: a chunk that brings
    drafts is one verification. Without them the number of steps is not known.
    """
    with_drafts = [t for t in timings if _count(t, "draft_n") is not None]
    if not with_drafts:
        return None
    total = with_drafts[-1]
    drafted, accepted = _count(total, "draft_n") or 0, _count(total, "draft_n_accepted") or 0
    if drafted == 0:
        return None
    counts = [(_count(t, "draft_n") or 0, _count(t, "draft_n_accepted") or 0) for t in with_drafts]
    steps = [
        (after[0] - before[0], after[1] - before[1])
        for before, after in zip([(0, 0), *counts], counts, strict=False)
        if after[0] > before[0]
    ]
    per_chunk = len(with_drafts) > 1 and len(steps) > 1
    if not per_chunk:
        return RequestAcceptance(source="timings", num_drafted=drafted, num_accepted=accepted)
    return RequestAcceptance(
        source="timing_chunks",
        num_drafted=drafted,
        num_accepted=accepted,
        num_steps=len(steps),
        exact=False,
        histogram=count_histogram([a for _, a in steps]),
        per_step_accepted=tuple(a for _, a in steps),
        per_step_drafted=tuple(d for d, _ in steps),
    )


def from_spec_details(details: Any) -> RequestAcceptance | None:
    """SGLang's `spec_tokens_details` (return_spec_tokens_details)."""
    if not isinstance(details, dict):
        return None
    names = ("spec_verify_ct", "verify_count", "num_verify")
    steps = next((_count(details, n) for n in names if _count(details, n) is not None), None)
    names = ("proposed_drafts", "spec_draft_token_num", "num_draft_tokens")
    drafted = next((_count(details, n) for n in names if _count(details, n) is not None), None)
    names = ("correct_drafts", "spec_accept_token_num", "num_accepted_tokens")
    accepted = next((_count(details, n) for n in names if _count(details, n) is not None), None)
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


def from_chunks(chunk_tokens: Sequence[int], k: int) -> RequestAcceptance | None:
    """From tokens per chunk: a chunk after the first is a step, of one token and what it accepted.

    A guess: chunks merge when the server or the network lags, and drafts may be shorter than `k`.
    None if a chunk is larger than a step can be.
    """
    accepted = [tokens - 1 for tokens in chunk_tokens[1:] if tokens > 0]
    if not accepted or k < 1 or max(accepted) > k:
        return None
    return RequestAcceptance(
        source="chunks",
        num_drafted=k * len(accepted),
        num_accepted=sum(accepted),
        num_steps=len(accepted),
        exact=False,
        histogram=count_histogram(accepted),
        per_step_accepted=tuple(accepted),
    )


def count_histogram(accepted: Sequence[int]) -> tuple[int, ...]:
    """Entry j: how often j stands in `accepted`."""
    return tuple(list(accepted).count(j) for j in range(max(accepted, default=-1) + 1))


def split_events(pieces: Sequence[tuple[float, bytes]]) -> tuple[list[tuple[float, bytes]], bytes]:
    """Events as (arrival, data), and what was left over after the last blank line."""
    events: list[tuple[float, bytes]] = []
    rest = b""
    for at, piece in pieces:
        rest = rest + piece if rest else piece
        if b"\r" in rest:
            rest = rest.replace(b"\r\n", b"\n")
        if b"\n\n" not in rest:
            continue
        *frames, rest = rest.split(b"\n\n")
        for frame in frames:
            data = _data_of(frame)
            if data is not None:
                events.append((at, data))
    return events, rest


def _data_of(frame: bytes) -> bytes | None:
    lines = [line[5:].removeprefix(b" ") for line in frame.split(b"\n") if line[:5] == b"data:"]
    return b"\n".join(lines) if lines else None


def parse_events(
    pieces: Sequence[tuple[float, bytes]], *, torn: bool = False
) -> tuple[list[tuple[float, dict[str, Any]]], bool]:
    """JSON objects with their arrivals, and whether the stream ended with [DONE].

    Of a `torn` stream the last event may be cut in the middle, and is left out then.

    Raises:
        ValueError: an event is not a JSON object.
    """
    found: list[tuple[float, dict[str, Any]]] = []
    events, rest = split_events(pieces)
    if not torn and rest.strip().startswith(b"data:"):
        events.append((pieces[-1][0], _data_of(rest.strip()) or b""))
    for at, data in events:
        if data.strip() == b"[DONE]":
            return found, True
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"an event is not an object: {data[:60]!r}")
        found.append((at, value))
    return found, False


@dataclass(slots=True)
class _Reading:
    text: list[str]
    chunk_s: list[float]
    chunk_tokens: list[int]
    timings: list[dict[str, Any]]
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    metrics: Any = None
    details: Any = None
    error: str | None = None
    all_have_ids: bool = True

    def add(self, at: float, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = f"server: {_message(event['error'])}"
        self.usage = event.get("usage") or self.usage
        self.metrics = event.get("metrics") or self.metrics
        self.details = (event.get("sglext") or {}).get("spec_tokens_details") or self.details
        if isinstance(event.get("timings"), dict):
            self.timings.append(event["timings"])
        for choice in event.get("choices") or ():
            self._add_choice(at, choice)

    def _add_choice(self, at: float, choice: dict[str, Any]) -> None:
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        delta = choice.get("delta") or choice.get("message") or {}
        text = choice.get("text") or delta.get("content") or ""
        text = text or delta.get("reasoning_content") or delta.get("reasoning") or ""
        ids = choice.get("token_ids") or delta.get("token_ids")
        if not text and not ids:
            return
        self.text.append(text)
        self.chunk_s.append(at)
        if isinstance(ids, list):
            self.chunk_tokens.append(len(ids))
        else:
            self.all_have_ids = False

    def acceptance(self, k: int) -> RequestAcceptance | None:
        found = from_body(self.metrics) or from_spec_details(self.details)
        found = found or from_timings(self.timings)
        if found is None and self.all_have_ids and self.metrics is None:
            found = from_chunks(self.chunk_tokens, k)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """How answers are read."""

    start_s: float
    """Start of the run on the monotonic clock."""
    k: int = 0
    """Draft length to assume where only chunks tell; 0: do not."""
    keep_text: bool = False


def read_answer(record: RequestRecord, answer: Answer, options: ReadingOptions) -> RequestRecord:
    """`record` with everything that `answer` says; mistakes of the server become its `error`."""
    reading = _Reading([], [], [], [])
    error = None
    if answer.status >= 400:
        kind = "refused" if answer.status < 500 else "server"
        error = f"{kind}: HTTP {answer.status}: {error_text(answer.body)}"
    else:
        error = _read_body(reading, answer) or reading.error
    error = error or _completeness(reading)
    text = "".join(reading.text)
    tokens = reading.chunk_tokens if reading.all_have_ids else []
    zero = options.start_s
    output_tokens = (reading.usage or {}).get("completion_tokens")
    return replace(
        record,
        sent_s=answer.sent_s - zero,
        first_s=reading.chunk_s[0] - zero if reading.chunk_s else None,
        last_s=reading.chunk_s[-1] - zero if reading.chunk_s else None,
        end_s=answer.end_s - zero,
        chunk_s=tuple(round(at - zero, 6) for at in reading.chunk_s),
        chunk_tokens=tuple(tokens),
        prompt_tokens=(reading.usage or {}).get("prompt_tokens"),
        output_tokens=output_tokens if output_tokens is not None else _sum(tokens),
        finish_reason=reading.finish_reason,
        error=error,
        text=text if options.keep_text else None,
        text_hash=hashlib.sha256(text.encode()).hexdigest()[:16] if text else None,
        acceptance=reading.acceptance(options.k) if error is None else None,
        server=_server_times(reading),
    )


def failed(
    record: RequestRecord, error: TransportError, start_s: float, at: float
) -> RequestRecord:
    """`record` of a request that got no answer, given up at `at`."""
    return replace(record, error=str(error), end_s=at - start_s)


def _read_body(reading: _Reading, answer: Answer) -> str | None:
    headers = dict(answer.headers)
    try:
        if "event-stream" in headers.get("content-type", ""):
            events, done = parse_events(answer.pieces, torn=answer.broken is not None)
            for at, event in events:
                reading.add(at, event)
            if answer.broken is not None:
                return str(answer.broken)
            if not done and reading.finish_reason is None and reading.error is None:
                return "truncated: the stream ended without a finish reason"
            return None
        if answer.broken is not None:
            return str(answer.broken)
        reading.add(answer.end_s, json.loads(answer.body))
    except (ValueError, AttributeError, TypeError) as error:
        return f"protocol: not what an OpenAI-style server sends ({error})"[:300]
    return None


def _completeness(reading: _Reading) -> str | None:
    if not reading.chunk_s:
        return "protocol: an answer without text"
    return None


def _server_times(reading: _Reading) -> dict[str, float]:
    """What the server says about its own time, in seconds."""
    found: dict[str, float] = {}
    if isinstance(reading.metrics, dict):
        names = {
            "queue_time_ms": "queue_s",
            "time_to_first_token_ms": "ttft_s",
            "generation_time_ms": "decode_s",
            "mean_itl_ms": "tpot_s",
        }
        for theirs, ours in names.items():
            if isinstance(reading.metrics.get(theirs), int | float):
                found[ours] = reading.metrics[theirs] / 1000
    if reading.timings:
        last = reading.timings[-1]
        for theirs, ours in {"prompt_ms": "prefill_s", "predicted_ms": "decode_s"}.items():
            if isinstance(last.get(theirs), int | float):
                found[ours] = last[theirs] / 1000
    return found


def _sum(tokens: list[int]) -> int | None:
    return sum(tokens) if tokens else None


def error_text(body: bytes) -> str:
    """What a server says in an answer that is an error."""
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace")
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(value: Any) -> str:
    text = value.get("message") if isinstance(value, dict) else None
    return str(text if text is not None else value)[:300]
