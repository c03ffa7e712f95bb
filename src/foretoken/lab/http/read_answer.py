"""A finished HTTP answer to a RequestRecord: texts, token counts, times, acceptance, errors.

Reads both shapes (completions and chat), streamed or whole, from any of the known servers. A stream
is server-sent events (lines `data:`, a blank line between events), each with the time its last byte
arrived. Runs after the answer is there, never while one is timed.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from foretoken.lab.http.reported import from_body, from_chunks, from_spec_details, from_timings
from foretoken.lab.http.timed import Answer, TransportError
from foretoken.lab.records.results import RequestAcceptance, RequestRecord


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
        error = f"{kind}: HTTP {answer.status}: {_error_text(answer.body)}"
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


def _error_text(body: bytes) -> str:
    try:
        value = json.loads(body)
    except ValueError:
        return body[:200].decode("utf-8", "replace")
    return _message(value.get("error", value) if isinstance(value, dict) else value)


def _message(value: Any) -> str:
    text = value.get("message") if isinstance(value, dict) else None
    return str(text if text is not None else value)[:300]
