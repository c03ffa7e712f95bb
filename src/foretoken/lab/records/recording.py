"""What of a request and its answer is written down, and what never is.

A record is a line of our own workload format, so that what was recorded can be replayed. Prompts
are kept, hashed or left out; what looks like a secret is taken out of those that are kept, and
headers are never written.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from foretoken.lab.http.read_answer import ReadingOptions, read_answer
from foretoken.lab.http.timed import Answer
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.secrets import redact_secrets

Prompts = Literal["keep", "hash", "none"]
_NOT_PARAMETERS = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens",
                   "max_completion_tokens", "temperature", "seed", "user", "metadata"}  # fmt: skip
_TEXTS = {"suffix", "tools", "functions"}
"""Parameters that are part of what is asked: kept only where prompts are."""
_OF_CHATS = {"tool_choice", "function_call", "parallel_tool_calls", "chat_template_kwargs",
             "top_logprobs"}  # fmt: skip
"""Parameters that mean nothing for the words that stand in for a conversation in a replay."""
_TAGS = ("x-tenant", "x-class", "x-request-id", "x-conversation-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One exchange that went through the proxy."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    answer: Answer
    arrived_s: float
    """On the monotonic clock."""
    start_s: float
    """When recording began, on the same clock."""


def line_of(seen: Seen, prompts: Prompts) -> dict[str, Any]:
    """The line to write."""
    options = ReadingOptions(start_s=seen.start_s)
    arrival = seen.arrived_s - seen.start_s
    record = RequestRecord(index=0, scheduled_s=arrival)
    record = read_answer(record, seen.answer, options)
    tags = {
        name[2:].replace("-", "_"): redact_secrets(seen.headers[name])
        for name in _TAGS
        if name in seen.headers
    }
    body = seen.body
    left_out = _NOT_PARAMETERS | (set() if prompts == "keep" else _TEXTS | _OF_CHATS)
    length = body.get("max_tokens") or body.get("max_completion_tokens")
    return {
        "kind": "recorded",
        "arrival_s": round(arrival, 6),
        **_prompt(body, prompts),
        "max_tokens": length if length is not None else record.output_tokens or 128,
        "temperature": body.get("temperature"),
        "seed": body.get("seed"),
        "parameters": {k: _clean(v) for k, v in body.items() if k not in left_out},
        "category": tags.get("class", ""),
        "cluster": tags.get("conversation_id", ""),
        "observed": {
            "path": seen.path,
            "status": seen.answer.status or None,
            "tags": tags,
            "ttft_s": record.ttft_s if record.first_s is not None else None,
            "e2e_s": record.e2e_s if record.last_s is not None else None,
            "prompt_tokens": record.prompt_tokens,
            "output_tokens": record.output_tokens,
            "finish_reason": record.finish_reason,
            "error": record.error,
            "acceptance": to_plain(record.acceptance),
        },
    }


def _prompt(body: Mapping[str, Any], prompts: Prompts) -> dict[str, Any]:
    asked = body.get("messages") if body.get("messages") is not None else body.get("prompt")
    if prompts == "keep":
        clean = _clean(asked)
        if body.get("messages") is not None:
            return {"messages": clean}
        if isinstance(clean, str):
            return {"prompt": clean}
    text = json.dumps(asked, sort_keys=True)
    if prompts == "none":
        return {"prompt_hash": ""}
    return {"prompt_hash": hashlib.sha256(text.encode()).hexdigest()[:32]}


def _clean(value: Any) -> Any:
    """`redact_secrets` in every string of a JSON value."""
    if isinstance(value, str):
        return redact_secrets(value)
    if isinstance(value, list):
        return [_clean(part) for part in value]
    if isinstance(value, dict):
        return {key: _clean(part) for key, part in value.items()}
    return value
