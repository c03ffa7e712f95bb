"""A reverse proxy that writes down what goes through it and never breaks it.

Bytes are passed on as they come. The one change is that a stream is asked for its usage, which
carries acceptance too; the chunk that brings it is taken out again where the client did not ask.
If anything about recording fails (a full disk, an answer that cannot be read), the traffic goes on
and the failure is counted.

A record is a line of our own workload format, so that what was recorded can be replayed. Prompts
are kept, hashed or left out; what looks like a secret is taken out of those that are kept, and
headers are never written.
"""

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from foretoken.lab.http.read_answer import ReadingOptions, read_answer
from foretoken.lab.http.timed import Answer, HttpPool, Incoming, TransportError, now
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import LineWriter
from foretoken.lab.records.secrets import redact_secrets

Prompts = Literal["keep", "hash", "none"]
PROMPTS = get_args(Prompts)
_NOT_PARAMETERS = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens",
                   "max_completion_tokens", "temperature", "seed", "user", "metadata"}  # fmt: skip
_TEXTS = {"suffix", "tools", "functions"}
"""Parameters that are part of what is asked: kept only where prompts are."""
_OF_CHATS = {"tool_choice", "function_call", "parallel_tool_calls", "chat_template_kwargs",
             "top_logprobs"}  # fmt: skip
"""Parameters that mean nothing for the words that stand in for a conversation in a replay."""
_TAGS = ("x-tenant", "x-class", "x-request-id", "x-conversation-id")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedExchange:
    """One exchange that went through the proxy."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    answer: Answer
    arrived_s: float
    """On the monotonic clock."""
    start_s: float
    """When recording began, on the same clock."""


def line_of(seen: RecordedExchange, prompts: Prompts) -> dict[str, Any]:
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


logger = logging.getLogger("foretoken")
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host",
        "content-length", "proxy-authorization", "proxy-connection", "accept-encoding",
        "expect"}  # fmt: skip
LEFT = "left"
"""Kind of the error of a request whose client went before its answer ended."""
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_GENERATING = ("/v1/completions", "/v1/chat/completions")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordConfig:
    """How the proxy works."""

    upstream: str
    prompts: Prompts = "hash"
    timeout_s: float = 3600.0


class RecordingProxy:
    """The ASGI application."""

    def __init__(self, config: RecordConfig, writer: LineWriter) -> None:
        """Pass on to `config.upstream`, write lines with `writer`."""
        self.config = config
        self._pool = HttpPool(config.upstream)
        self._writer = writer
        self._start_s = now()
        self.recorded = self.lost = 0
        self._app = Starlette(routes=[Mount("/", app=self._serve)], lifespan=self._lifespan)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._pool.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = now()
        request = Request(scope, receive)
        headers, url = dict(request.headers), request.url
        raw = await request.body()
        parsed = _parse(raw) if url.path in _GENERATING else None
        body, strip = _ask_for_usage(parsed, raw)
        kept = {n: v for n, v in headers.items() if n not in _HOP}
        kept.setdefault("content-type", "application/json")
        path = url.path + (f"?{url.query}" if url.query else "")
        answer = await self._pass_on(path, body, (kept, strip), request, send)
        if parsed is not None:
            self._record(
                RecordedExchange(
                    path=url.path,
                    body=parsed,
                    headers=headers,
                    answer=answer,
                    arrived_s=arrived,
                    start_s=self._start_s,
                )
            )
        if answer.broken is not None and answer.status and answer.broken.kind != LEFT:
            # Ending the body in order would tell the client that the answer is whole.
            raise ConnectionResetError(str(answer.broken))

    async def _pass_on(
        self, path: str, body: bytes, how: tuple[dict[str, str], bool], request: Request, send: Send
    ) -> Answer:
        """What came back, with `broken` set if the upstream or the client ended it early."""
        headers, strip = how
        incoming, began = Incoming(), now()
        asking = asyncio.create_task(
            self._pool.send(
                request.method, path, body, timeout_s=self.config.timeout_s, headers=headers,
                incoming=incoming,
            )
        )  # fmt: skip
        leaving = asyncio.create_task(_wait_for_end(request.receive))
        leaving.add_done_callback(lambda _: asking.cancel())
        try:
            return await _forward(incoming, asking, strip, send)
        except TransportError as error:
            said = {"error": {"message": f"upstream: {error}", "type": "upstream"}}
            await JSONResponse(said, 502)(request.scope, request.receive, send)
            return incoming.cut_off(error, began)
        except asyncio.CancelledError:
            if not leaving.done():
                raise
            return incoming.cut_off(TransportError(LEFT, "the client has gone"), began)
        finally:
            leaving.cancel()

    def _record(self, seen: RecordedExchange) -> None:
        try:
            self._writer.write(line_of(seen, self.config.prompts))
            self.recorded += 1
        except (OSError, ValueError, TypeError) as error:
            if self.lost == 0:
                logger.warning("recording fails, the traffic goes on: %s", error)
            self.lost += 1


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _ask_for_usage(parsed: dict[str, Any] | None, raw: bytes) -> tuple[bytes, bool]:
    """The body to send, and whether the usage chunk has to be taken out of the answer."""
    if parsed is None or parsed.get("stream") is not True:
        return raw, False
    options = parsed.get("stream_options") or {}
    if not isinstance(options, dict) or options.get("include_usage"):
        return raw, False
    asked = {**parsed, "stream_options": {**options, "include_usage": True}}
    return json.dumps(asked).encode(), True


async def _forward(
    incoming: Incoming, asking: "asyncio.Task[Answer]", strip: bool, send: Send
) -> Answer:
    """Pass head and pieces on; an answer that broke off is not ended.

    Raises:
        TransportError: there was no answer at all.
    """
    head = asyncio.create_task(incoming.head.wait())
    await asyncio.wait({head, asking}, return_when=asyncio.FIRST_COMPLETED)
    head.cancel()
    if not incoming.started:
        await asking
    status, headers = incoming.status, incoming.headers
    kept = [(n.encode(), v.encode("latin-1")) for n, v in headers
            if n not in _HOP or (n == "content-length" and not strip)]  # fmt: skip
    await send({"type": "http.response.start", "status": status, "headers": kept})
    pieces = _without_usage(incoming.pieces()) if strip and status == 200 else incoming.pieces()
    async for piece in pieces:
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    answer = await asking
    if answer.broken is None:
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    return answer


async def _without_usage(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream but those with usage and no choices.

    llama.cpp puts its `timings` there, which without usage are in the event before it: the last
    one is held back for as long as it takes to know.
    """
    rest, held = b"", b""
    async for piece in pieces:
        rest += piece
        end = max(rest.rfind(b"\n\n"), rest.rfind(b"\r\n\r\n"))
        if end < 0:
            continue
        width = 2 if rest[end : end + 2] == b"\n\n" else 4
        whole, rest = rest[: end + width], rest[end + width :]
        passed = []
        for frame in _frames(whole):
            if _is_usage(frame):
                held = _with_timings(held, frame)
                continue
            passed.append(held)
            held = frame
            if not _FINISHED.search(frame):
                passed.append(held)
                held = b""
        if any(passed):
            yield b"".join(passed)
    if held or rest:
        yield held + rest


def _frames(whole: bytes) -> list[bytes]:
    mark = b"\r\n\r\n" if b"\r\n\r\n" in whole else b"\n\n"
    return [frame + mark for frame in whole.split(mark)[:-1]]


def _event(frame: bytes) -> dict[str, Any] | None:
    return _parse(frame.strip().removeprefix(b"data:").strip())


def _with_timings(frame: bytes, usage: bytes) -> bytes:
    """The frame with the timings of the usage frame that is left out, if it has any."""
    event, timings = _event(frame), (_event(usage) or {}).get("timings")
    if event is None or timings is None:
        return frame
    data = json.dumps({**event, "timings": timings}, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode() + frame[len(frame.rstrip()) :]


def _is_usage(frame: bytes) -> bool:
    if b'"usage"' not in frame:
        return False
    event = _event(frame)
    return event is not None and event.get("usage") is not None and not event.get("choices")


async def _wait_for_end(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
