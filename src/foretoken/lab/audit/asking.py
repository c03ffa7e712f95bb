"""Requests to one server, and everything that it answered, as the checks read it.

An `Asker` sends bodies within a limit of open requests and keeps every reply, for checks that only
read. Answers that several checks want are asked for once. `OneAtATime` lets one server of a machine
compute at a time: servers whose threads wait by spinning take the cores from each other, and two
that were asked at once on two cores answered a hundredth as fast as either alone.

A `Reply` is read of completions and chat completions, whole or streamed, with both shapes of
log-probabilities. What a server does not tell is None or empty; what is no answer of such a server
is its error, whatever it is, and numbers are numbers from here on. One that leaves requests
unanswered is not waited for again and again (`PatientPool`).
"""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from foretoken.lab.http.read_answer import (
    counts_in,
    error_text,
    from_body,
    from_spec_details,
    from_timings,
    parse_events,
)
from foretoken.lab.http.timed import Answer, Pool, TransportError
from foretoken.lab.records.results import RequestAcceptance

_PATHS = {False: "/v1/completions", True: "/v1/chat/completions"}
_BUSY = (408, 429)
"""HTTP statuses of a server that would answer at another time."""
IN_FLIGHT = 8
"""Requests at one server."""
TOPS = 5
"""Likeliest tokens that greedy answers are asked for."""
_MOST_LOST, _MOST_LATE = 8, 4
"""Requests in a row that nothing came back for, and that took too long in all, before nobody asks
any more."""
_MOST_BYTES = 1 << 22
"""Of an answer: more were not asked for."""
_MOST_LOG = 700.0
"""Of a log-probability: what is above is no number to reckon with."""


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt that checks ask about."""

    number: int
    prompt: str
    max_tokens: int
    before: str = ""
    """What the prompt begins with, shared with other cases: it stands before what checks ask by
    themselves too."""


def cases_of(texts: Sequence[str], count: int, max_tokens: int, start: int = 0) -> list[Case]:
    """`count` cases from number `start` on; prompts that come again are cut shorter each time."""
    found = []
    for number in range(start, start + count):
        round_, place = divmod(number, len(texts))
        text = texts[place]
        found.append(Case(number, text[: max(8, int(len(text) * 0.85**round_))], max_tokens))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back for one request."""

    body: Mapping[str, Any]
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
    usage: Mapping[str, int] | None = None
    calls: tuple[tuple[str, str], ...] = ()
    """Functions that the model calls, and the texts of their arguments."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were not computed again."""
    acceptance: RequestAcceptance | None = None
    """What became of its drafts, if the server tells."""
    refused: str | None = None
    """Why the server does not take such a request."""
    error: str | None = None

    @property
    def ok(self) -> bool:
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
    def prompt_tokens(self) -> int | None:
        return (self.usage or {}).get("prompt_tokens")

    @property
    def finish_reason(self) -> str | None:
        return self.finish_reasons[-1] if self.finish_reasons else None


def read_reply(body: Mapping[str, Any], answer: Answer) -> Reply:
    if (400 <= answer.status < 500 and answer.status not in _BUSY) or answer.status == 501:
        said = " ".join(error_text(answer.body).split())[:160]
        return Reply(body=body, refused=f"HTTP {answer.status}: {said}")
    if not 200 <= answer.status < 300 or answer.broken is not None:
        return Reply(body=body, error=str(answer.broken or f"HTTP {answer.status}"))
    if (size := sum(len(piece) for _, piece in answer.pieces)) > _MOST_BYTES:
        return Reply(body=body, error=f"an answer of {size / 1e6:.0f} MB")
    try:
        if body.get("stream"):
            events, done = parse_events(answer.pieces)
            reply = _read(body, [event for _, event in events])
            if not (done or reply.finish_reasons or reply.error):
                raise ValueError("the stream ended without a finish reason")
            return reply
        return _read(body, [json.loads(answer.body)])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"[:120]
        return Reply(body=body, error=f"not what an OpenAI-style server sends ({why})")


def _read(body: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> Reply:
    texts: list[str] = []
    ids: list[int] = []
    rows: list[tuple[str, float, Mapping[str, float]]] = []
    ends: list[str] = []
    calls: dict[int, list[str]] = {}
    after, prompt_ids, usage, cached = False, list[int](), dict[str, int](), None
    drafts: RequestAcceptance | None = None
    all_timings: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("error"):
            return Reply(body=body, error=str(event["error"])[:160])
        given = event.get("usage") or {}
        usage, timings = counts_in(given) or usage, event.get("timings") or {}
        cached = counts_in(timings).get("cache_n", cached)
        cached = counts_in(given.get("prompt_tokens_details") or {}).get("cached_tokens", cached)
        all_timings += [timings] if timings else []
        spec = (event.get("sglext") or {}).get("spec_tokens_details")
        drafts = from_body(event.get("metrics")) or from_spec_details(spec) or drafts
        for choice in event.get("choices") or ():
            part = choice.get("delta") or choice.get("message") or {}
            text = choice.get("text") or part.get("content") or ""
            after = after or bool(text and ends)
            texts.append(text)
            own = choice.get("token_ids", part.get("token_ids"))
            ids += _ids(own)
            told = choice.get("prompt_token_ids") or event.get("prompt_token_ids")
            prompt_ids = _ids(told) or prompt_ids  # the first event of a stream has them
            rows += _rows(choice.get("logprobs"))
            for call in part.get("tool_calls") or ():  # whole, or its next piece
                function = call.get("function") or {}
                one = calls.setdefault(int(call.get("index") or 0), ["", ""])
                one[0] = one[0] or function.get("name") or ""
                one[1] += function.get("arguments") or ""
            if choice.get("finish_reason"):
                ends.append(str(choice["finish_reason"]))
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
        usage=usage or None,
        calls=tuple((name, arguments) for name, arguments in calls.values()),
        cached_tokens=cached,
        acceptance=drafts or from_timings(all_timings),
    )


def _ids(given: Any) -> list[int]:
    found = [value for value in given or () if isinstance(value, int)]
    if len(found) != len(given or ()):
        raise ValueError("token ids that are no numbers")
    return found


def _rows(given: Any) -> list[tuple[str, float, Mapping[str, float]]]:
    if not isinstance(given, dict):
        return []
    if isinstance(given.get("content"), list):
        return [
            (
                str(entry["token"]),
                _log(entry["logprob"]),
                _tops((top["token"], top["logprob"]) for top in entry["top_logprobs"] or ()),
            )
            for entry in given["content"]
        ]
    tokens = given.get("tokens") or []
    own = given.get("token_logprobs") or [None] * len(tokens)
    tops = given.get("top_logprobs") or [{}] * len(tokens)
    return [
        (str(token), _log(value), _tops((top or {}).items()))
        for token, value, top in zip(tokens, own, tops, strict=True)
    ]


def _log(given: Any) -> float:
    """A log-probability; NaN: not told."""
    value = math.nan if given is None else float(given)
    if value > _MOST_LOG:
        raise ValueError(f"a log-probability of {value}")
    return value if math.isfinite(value) else math.nan


def _tops(given: Iterable[tuple[Any, Any]]) -> dict[str, float]:
    found = {str(token): _log(value) for token, value in given}
    return {token: value for token, value in found.items() if not math.isnan(value)}


class PatientPool:
    """A server, by whoever asks it: one that leaves requests unanswered is asked no more."""

    def __init__(self, pool: Pool) -> None:
        self.gone = ""
        """Why it is asked no more; empty: it is."""
        self.server = pool
        """For requests whose answers nobody needs."""
        self._lost = self._late = 0

    async def send(self, method: str, path: str, body: bytes = b"", *, timeout_s: float) -> Answer:
        if method != "POST":
            return await self.server.send(method, path, body, timeout_s=timeout_s)
        try:
            answer = await self.server.send(method, path, body, timeout_s=timeout_s)
        except TransportError as error:
            self._heard(error)
            raise
        self._heard(answer.broken)
        return answer

    def _heard(self, error: TransportError | None) -> None:
        if error is None:
            self._lost = 0
            return
        self._lost, self._late = self._lost + 1, self._late + (error.kind == "timeout")
        if not self.gone and (self._lost >= _MOST_LOST or self._late >= _MOST_LATE):
            count = max(self._lost, self._late)
            self.gone = f"{count} requests were left unanswered ({error}); no more were sent"


class OneAtATime:
    """Lets any number of requests of one asker through, and never of two."""

    def __init__(self) -> None:
        self._holder: object | None = None
        self._open = 0
        self._ended = asyncio.Condition()

    @asynccontextmanager
    async def of(self, who: object) -> AsyncIterator[None]:
        """A request of `who`, which begins when it is its turn."""
        async with self._ended:
            await self._ended.wait_for(lambda: not self._open or self._holder is who)
            self._holder, self._open = who, self._open + 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                async with self._ended:
                    self._ended.notify_all()


class Asker:
    """One server, or one manner of asking it."""

    def __init__(
        self,
        pool: Pool,
        model: str | None,
        *,
        extra_body: Mapping[str, Any] | None = None,
        timeout_s: float = 300.0,
        turns: OneAtATime | None = None,
        in_flight: int = IN_FLIGHT,
    ) -> None:
        self.replies: list[Reply] = []
        self.heard: Callable[[Reply], Awaitable[None]] | None = None
        """Who is told of every reply."""
        self.num_asked = 0
        self._pool = pool if isinstance(pool, PatientPool) else PatientPool(pool)
        self.manner: dict[str, Any] = {"pool": self._pool, "model": model,
                       "extra_body": extra_body, "timeout_s": timeout_s}  # fmt: skip
        """Whom it asks and how, for another one that asks in the same way."""
        self.timeout_s = timeout_s
        self._fixed = {"model": model, **(extra_body or {})}
        self.in_flight = in_flight
        self._gate = asyncio.Semaphore(in_flight)
        self._turns = turns
        self._greedy: dict[tuple[int, bool, bool], asyncio.Task[Reply]] = {}

    @property
    def gone(self) -> str:
        """Why the server is asked no more; empty: it is."""
        return self._pool.gone

    async def ask(
        self, body: Mapping[str, Any], *, chat: bool = False, stream: bool = False
    ) -> Reply:
        whole = {**self._fixed, **body}
        if stream:
            whole |= {"stream": True, "stream_options": {"include_usage": True}}
        turn = nullcontext() if self._turns is None else self._turns.of(self)
        async with turn, self._gate:
            if self.gone:
                return Reply(body=whole, error=self.gone)
            self.num_asked += 1
            try:
                answer = await self._pool.send(
                    "POST", _PATHS[chat], json.dumps(whole).encode(), timeout_s=self.timeout_s
                )
                reply = read_reply(whole, answer)
            except TransportError as error:
                reply = Reply(body=whole, error=str(error))
        self.replies.append(reply)
        if self.heard is not None:
            await self.heard(reply)
        return reply

    async def greedy(self, case: Case, again: bool = False, stream: bool = False) -> Reply:
        """The likeliest continuation of a case; `again`: asked anew."""
        key = (case.number, again, stream)
        if key not in self._greedy:
            self._greedy[key] = asyncio.create_task(self._ask_greedy(case, stream))
        return await self._greedy[key]

    async def _ask_greedy(self, case: Case, stream: bool) -> Reply:
        body = {"prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0.0}
        return await self.told(body, stream=stream)

    async def told(self, body: Mapping[str, Any], *, stream: bool = False) -> Reply:
        """With log-probabilities, if the server takes such a request."""
        reply = await self.ask({**body, "logprobs": TOPS}, stream=stream)
        return reply if reply.refused is None else await self.ask(body, stream=stream)

    async def undrafted(self, prompt: str, end: str, most: int) -> Reply:
        """What the server writes greedily as far as `end`, at most `most` tokens, when it is asked
        for one token at a time: no draft stands for the first token of an answer, so this is plain
        decoding, of a server that speculates too."""
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0}
        parts: list[Reply] = []
        while len(parts) < most and not any(end in part.text for part in parts[-1:]):
            reply = await self.told(body)
            if not reply.ok:
                return reply
            last = parts[-1].prompt_tokens if parts else None
            if last is not None and reply.prompt_tokens != last + 1:
                return replace(reply, refused="as a prompt the text is cut into other tokens")
            parts.append(reply)
            if not reply.text or reply.finish_reason == "stop":
                break
            text = "".join(part.text for part in parts)
            ids = [part.token_ids for part in parts]
            known = parts[0].prompt_ids is not None and None not in ids
            body["prompt"] = prompt + text
            if known:  # a character may be cut between tokens, which their numbers never are
                body["prompt"] = [
                    *(parts[0].prompt_ids or ()),
                    *(n for own in ids for n in own or ()),
                ]
        rows = all(part.tokens is not None for part in parts)
        return replace(
            parts[-1],
            body={**body, "prompt": prompt},
            text="".join(part.text for part in parts),
            tokens=tuple(t for part in parts for t in part.tokens or ()) if rows else None,
            tops=tuple(top for part in parts for top in part.tops),
        )
