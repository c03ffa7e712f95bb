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
from typing import Any, Literal, get_args

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount
from starlette.types import Receive, Scope, Send

from foretoken.lab.http.read_answer import read_answer
from foretoken.lab.http.timed import Answer, HttpPool, Incoming, TransportError, now
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.records.run_files import LineWriter, redact_secrets

Prompts = Literal["keep", "hash", "none"]
PROMPTS = get_args(Prompts)
_NOT_PARAMETERS = {"model", "prompt", "messages", "stream", "stream_options", "max_tokens",
                   "max_completion_tokens", "temperature", "seed", "user", "metadata"}  # fmt: skip
_ONLY_WITH_PROMPTS = {"suffix", "tools", "functions", "tool_choice", "function_call",
                      "parallel_tool_calls", "chat_template_kwargs", "top_logprobs"}  # fmt: skip
"""Parameters that are part of what is asked, or mean nothing for words that stand in for a chat."""
_TAGS = ("x-tenant", "x-class", "x-request-id", "x-conversation-id")
_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host",
        "content-length", "proxy-authorization", "proxy-connection", "accept-encoding",
        "expect"}  # fmt: skip
_GENERATING = ("/v1/completions", "/v1/chat/completions")
_FINISHED = re.compile(rb'"finish_reason":\s*"')
_END_OF_EVENT = re.compile(rb"(?<=\n\n)|(?<=\r\n\r\n)")
_TIMEOUT_S = 3600.0
logger = logging.getLogger("foretoken")


class RecordingProxy(Starlette):
    def __init__(self, upstream: str, writer: LineWriter, prompts: Prompts = "hash") -> None:
        self._pool, self._writer, self._prompts = HttpPool(upstream), writer, prompts
        self._start_s = now()
        self.recorded = self.lost = 0
        super().__init__(routes=[Mount("/", app=self._serve)], lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        yield
        await self._pool.close()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request, arrived_s = Request(scope, receive), now()
        body = await request.body()
        asked = _parse(body) if request.url.path in _GENERATING else None
        strip = False
        if asked is not None and asked.get("stream") is True:
            options = asked.get("stream_options") or {}
            strip = isinstance(options, dict) and not options.get("include_usage")
            if strip:
                changed = {**asked, "stream_options": {**options, "include_usage": True}}
                body = json.dumps(changed).encode()
        incoming, broken = Incoming(), TransportError("left", "the client has gone")
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        headers.setdefault("content-type", "application/json")
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        sending = self._pool.send(
            request.method, path, body, timeout_s=_TIMEOUT_S, headers=headers, incoming=incoming
        )
        asking = asyncio.create_task(sending)
        try:
            if await _begins(incoming, asking, receive):
                await _response(incoming, asking, strip)(scope, receive, send)
        except TransportError as error:
            broken = error
            said = {"error": {"message": f"upstream: {error}", "type": "upstream"}}
            await JSONResponse(said, 502)(scope, receive, send)
        finally:
            cut = asking.cancel() or asking.cancelled() or asking.exception() is not None
            answer = incoming.cut_off(broken, arrived_s) if cut else asking.result()
            if asked is not None:
                self._record(request, asked, answer, arrived_s - self._start_s)

    def _record(
        self, request: Request, asked: Mapping[str, Any], answer: Answer, arrival_s: float
    ) -> None:
        try:
            self._writer.write(self._line(request, asked, answer, arrival_s))
            self.recorded += 1
        except (OSError, ValueError, TypeError) as error:
            if self.lost == 0:
                logger.warning("recording fails, the traffic goes on: %s", error)
            self.lost += 1

    def _line(
        self, request: Request, asked: Mapping[str, Any], answer: Answer, arrival_s: float
    ) -> dict[str, Any]:
        record = RequestRecord(index=0, scheduled_s=arrival_s)
        record = read_answer(record, answer, self._start_s)
        tags = {
            name[2:].replace("-", "_"): redact_secrets(request.headers[name])
            for name in _TAGS
            if name in request.headers
        }
        left_out = _NOT_PARAMETERS | (set() if self._prompts == "keep" else _ONLY_WITH_PROMPTS)
        length = asked.get("max_tokens") or asked.get("max_completion_tokens")
        return {
            "kind": "recorded",
            "arrival_s": round(arrival_s, 6),
            **_prompt(asked, self._prompts),
            "max_tokens": length if length is not None else record.output_tokens or 128,
            "temperature": asked.get("temperature"),
            "seed": asked.get("seed"),
            "parameters": {k: _clean(v) for k, v in asked.items() if k not in left_out},
            "category": tags.get("class", ""),
            "cluster": tags.get("conversation_id", ""),
            "observed": {
                "path": request.url.path,
                "status": answer.status or None,
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


async def _begins(incoming: Incoming, asking: "asyncio.Task[Answer]", receive: Receive) -> bool:
    """Wait for the head of the answer; False if the client goes first. Raises TransportError if
    there is no answer."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    waiting = [asyncio.create_task(incoming.head.wait()), asyncio.create_task(gone())]
    await asyncio.wait({*waiting, asking}, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()
    started = incoming.head.is_set()
    if asking.done() and not started:
        await asking
    return started


def _response(incoming: Incoming, asking: "asyncio.Task[Answer]", strip: bool) -> StreamingResponse:
    """The answer as it comes; one that breaks off is not ended, for it would look whole."""

    async def body() -> AsyncIterator[bytes]:
        pieces = incoming.pieces()
        async for piece in _without_usage(pieces) if strip else pieces:
            yield piece
        if (broken := (await asking).broken) is not None:
            raise ConnectionResetError(str(broken))

    strip = strip and incoming.status == 200
    response = StreamingResponse(body(), incoming.status)
    response.raw_headers = [
        (name.encode(), value.encode("latin-1")) for name, value in incoming.headers
        if name not in _HOP or (name == "content-length" and not strip)
    ]  # fmt: skip
    return response


def _prompt(asked: Mapping[str, Any], prompts: Prompts) -> dict[str, Any]:
    messages = asked.get("messages")
    said = messages if messages is not None else asked.get("prompt")
    if prompts == "keep" and (messages is not None or isinstance(said, str)):
        return {"prompt" if messages is None else "messages": _clean(said)}
    if prompts == "none":
        return {"prompt_hash": ""}
    text = json.dumps(said, sort_keys=True)
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


def _parse(raw: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


async def _without_usage(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The events of a stream but those with usage and no choices. llama.cpp puts its `timings`
    there, which without usage are in the event before it: the last one is held back for as long as
    it takes to know."""
    rest, held = b"", b""
    async for piece in pieces:
        *events, rest = _END_OF_EVENT.split(rest + piece)
        passed = b""
        for event in events:
            read = _read(event) if b'"usage"' in event else None
            if read and read.get("usage") is not None and not read.get("choices"):
                held = _with_timings(held, read.get("timings"))
                continue
            passed += held
            held = event
            if not _FINISHED.search(event):
                passed, held = passed + held, b""
        if passed:
            yield passed
    if held or rest:
        yield held + rest


def _read(event: bytes) -> dict[str, Any] | None:
    return _parse(event.strip().removeprefix(b"data:").strip())


def _with_timings(event: bytes, timings: object) -> bytes:
    """The event with the timings of the usage event that is left out, if it has any."""
    read = _read(event)
    if read is None or timings is None:
        return event
    data = json.dumps({**read, "timings": timings}, ensure_ascii=False, separators=(",", ":"))
    return b"data: " + data.encode() + event[len(event.rstrip()) :]
