"""One answer of a server as the checks read it: text, tokens, log-probabilities, usage, calls.

Reads completions and chat completions, whole or streamed; both shapes of log-probabilities. Knows
no times and no judgement. What a server does not tell is None or empty.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from foretoken.lab.http.read_answer import error_text, parse_events
from foretoken.lab.http.timed import Answer

_BUSY = (408, 429)
"""HTTP statuses of a server that would answer at another time."""


class ToolCall(NamedTuple):
    """A function that the model calls, and the text of its arguments."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back for one request."""

    body: Mapping[str, Any]
    """What was asked."""
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    tokens: tuple[str, ...] | None = None
    """Texts of the tokens, where log-probabilities were asked for."""
    logprobs: tuple[float, ...] = ()
    tops: tuple[Mapping[str, float], ...] = ()
    """Per token the likeliest tokens with their log-probabilities."""
    finish_reasons: tuple[str, ...] = ()
    text_after_end: bool = False
    usage: Mapping[str, Any] | None = None
    calls: tuple[ToolCall, ...] = ()
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed again."""
    refused: str | None = None
    """Why the server does not take such a request."""
    error: str | None = None
    """What broke."""

    @property
    def ok(self) -> bool:
        """Whether there is an answer."""
        return self.refused is None and self.error is None

    @property
    def tells_all(self) -> bool:
        """Whether the tokens with log-probabilities make up the text: a server may leave some
        out, and then they count nothing."""
        return self.tokens is not None and "".join(self.tokens) == self.text

    @property
    def num_tokens(self) -> int | None:
        """How many tokens came, if they can be told apart."""
        if self.token_ids is not None:
            return len(self.token_ids)
        return len(self.tokens) if self.tokens is not None and self.tells_all else None

    @property
    def finish_reason(self) -> str | None:
        """The last one."""
        return self.finish_reasons[-1] if self.finish_reasons else None


def read_reply(body: Mapping[str, Any], answer: Answer) -> Reply:
    """What `answer` says to `body`."""
    if (400 <= answer.status < 500 and answer.status not in _BUSY) or answer.status == 501:
        return Reply(
            body=body,
            refused=f"HTTP {answer.status}: {' '.join(error_text(answer.body).split())[:160]}",
        )
    if answer.status >= 500 or answer.broken is not None:
        return Reply(body=body, error=str(answer.broken or f"HTTP {answer.status}"))
    try:
        if body.get("stream"):
            events = [event for _, event in parse_events(answer.pieces)[0]]
        else:
            events = [json.loads(answer.body)]
        return _read(body, events)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Reply(body=body, error=f"not what an OpenAI-style server sends ({error!r})")


def _read(body: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Reply:
    texts: list[str] = []
    ids: list[int] | None = []
    rows: list[tuple[str, float, Mapping[str, float]]] = []
    ends: list[str] = []
    calls: dict[int, list[str]] = {}
    after, prompt_ids, usage, cached = False, None, None, None
    for event in events:
        if event.get("error"):
            return Reply(body=body, error=str(event["error"])[:160])
        usage = event.get("usage") or usage
        timings = event.get("timings") or {}
        cached = timings.get("cache_n", cached)
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or part.get("content") or ""
            after = after or bool(text and ends)
            texts.append(text)
            own = choice.get("token_ids", part.get("token_ids"))
            ids = [*ids, *own] if ids is not None and own is not None else ids
            told = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
            prompt_ids = told or prompt_ids  # the first event of a stream has them
            rows += _rows(choice.get("logprobs"))
            for call in part.get("tool_calls") or ():
                _add_call(calls, call)
            if choice.get("finish_reason"):
                ends.append(str(choice["finish_reason"]))
    details = (usage or {}).get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens", cached)
    return Reply(
        body=body,
        text="".join(texts),
        token_ids=tuple(ids) if ids else None,
        prompt_ids=tuple(prompt_ids) if prompt_ids else None,
        tokens=tuple(row[0] for row in rows) if rows else None,
        logprobs=tuple(row[1] for row in rows),
        tops=tuple(row[2] for row in rows),
        finish_reasons=tuple(ends),
        text_after_end=after,
        usage=usage,
        calls=tuple(ToolCall(name, arguments) for name, arguments in calls.values()),
        cached_tokens=cached,
    )


def _rows(given: Any) -> list[tuple[str, float, Mapping[str, float]]]:
    """Tokens with their log-probability and the likeliest beside it."""
    if not isinstance(given, dict):
        return []
    if isinstance(given.get("content"), list):
        return [
            (
                str(entry["token"]),
                float(entry["logprob"]),
                {str(top["token"]): float(top["logprob"]) for top in entry["top_logprobs"] or ()},
            )
            for entry in given["content"]
        ]
    tokens = given.get("tokens") or []
    own = given.get("token_logprobs") or [None] * len(tokens)
    tops = given.get("top_logprobs") or [{}] * len(tokens)
    return [
        (str(token), float("nan") if value is None else float(value), top or {})
        for token, value, top in zip(tokens, own, tops, strict=True)
    ]


def _add_call(calls: dict[int, list[str]], given: Mapping[str, Any]) -> None:
    """Add a call, or the next piece of one."""
    function = given.get("function") or {}
    one = calls.setdefault(int(given.get("index") or 0), ["", ""])
    one[0] = one[0] or function.get("name") or ""
    one[1] += function.get("arguments") or ""
