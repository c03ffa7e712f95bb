"""An OpenAI-style server without a model: known latencies, known acceptance, faults on demand.

A plain ASGI application around a MockEngine: /v1/completions, /v1/chat/completions, /v1/models,
/version, /health, vLLM-style /metrics and per-request numbers, and /mock/timings with when tokens
really left. For tests, for `foretoken lab mock`, and to try the lab without a model.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from foretoken.lab.http.timed import now
from foretoken.lab.mock.generation import WORDS, MockEngine, MockJob, MockLaw, MockModel, Timing

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MockFaults:
    """What goes wrong; every `n`-th request each, 0 for never."""

    truncate_every: int = 0
    """The connection is cut in the middle of the stream."""
    error_every: int = 0
    """HTTP 500."""
    hang_every: int = 0
    """No answer, ever."""
    no_metrics: bool = False
    """Neither /metrics nor per-request numbers."""
    refuse: tuple[str, ...] = ()
    """Parameters answered with HTTP 400, such as min_p."""


class MockServer:
    """The application."""

    def __init__(
        self, law: MockLaw, model: MockModel | None = None, faults: MockFaults | None = None
    ) -> None:
        """Serve `model` at the pace of `law`; the default faults are none."""
        self.law = law
        self.model, self.faults = model or MockModel(), faults or MockFaults()
        self.timings: list[Timing] = []
        self._engine: MockEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._count = 0

    @property
    def engine(self) -> MockEngine:
        """The running engine; started by the first request."""
        if self._engine is None:
            self._engine = MockEngine(self.law)
            self._task = asyncio.get_running_loop().create_task(self._engine.run())
        return self._engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        path = scope["path"].removesuffix("/")
        if path in ("/v1/completions", "/v1/chat/completions"):
            await self._generate(path, await _read(receive), receive, send)
            return
        answer = self._get(path)
        if isinstance(answer, str):
            await _reply(send, 200, answer.encode(), b"text/plain; version=0.0.4")
        elif answer is None:
            await _reply(send, 404, b'{"error": {"message": "no such path"}}')
        else:
            await _reply(send, 200, json.dumps(answer).encode())

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await send({"type": "lifespan.startup.complete"})
                continue
            if self._task is not None:
                self._task.cancel()
            await send({"type": "lifespan.shutdown.complete"})
            return

    def _get(self, path: str) -> Any:
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "mock", "owned_by": "mock"}]}
        if path == "/metrics" and not self.faults.no_metrics:
            return "\n".join(self._metrics()) + "\n"
        if path == "/mock/timings":
            names = Timing.__slots__
            return [{n: getattr(t, n) for n in names} for t in self.timings]
        return {"/version": {"version": "1"}, "/health": {}}.get(path)

    def _metrics(self) -> Iterator[str]:
        e = self.engine
        spec = "vllm:spec_decode_num_"
        counters = {
            f"{spec}drafts": e.num_drafts,
            f"{spec}draft_tokens": e.num_drafted,
            f"{spec}accepted_tokens": e.num_accepted,
            "vllm:generation_tokens": e.num_tokens,
        }
        for name, value in counters.items():
            yield f'{name}_total{{model_name="mock"}} {value}'
            yield f'{name}_created{{model_name="mock"}} 1.7e9'
        for position, value in enumerate(e.per_position):
            yield f'{spec}accepted_tokens_per_pos_total{{position="{position}"}} {value}'
        yield f'vllm:num_requests_running{{model_name="mock"}} {len(e.running)}'
        yield f'vllm:num_requests_waiting{{model_name="mock"}} {len(e.waiting)}'
        yield f'vllm:kv_cache_usage_perc{{model_name="mock"}} {len(e.running) / 64:.4f}'

    def _due(self, every: int) -> bool:
        return every > 0 and self._count % every == 0

    async def _generate(
        self, path: str, body: dict[str, Any], receive: Receive, send: Send
    ) -> None:
        received = now()
        self._count += 1
        if self._due(self.faults.hang_every):
            await asyncio.sleep(3600)
        refused = [name for name in self.faults.refuse if body.get(name)]
        if refused or self._due(self.faults.error_every):
            text = f"{refused[0]} is not supported" if refused else "the mock broke"
            error = json.dumps({"error": {"message": text}}).encode()
            await _reply(send, 400 if refused else 500, error)
            return
        job = self.engine.submit(
            f"cmpl-{self._count}", body.get("max_tokens") or 16, _temperature(body)
        )
        try:
            await _Talk(self, path, body, job).stream(send, self._due(self.faults.truncate_every))
        finally:
            self.engine.abort(job)
        timing = Timing(job.request_id, received, job.first_s, job.last_s, job.emitted)
        self.timings.append(timing)


class _Talk:
    """The stream of one request."""

    def __init__(self, server: MockServer, path: str, body: dict[str, Any], job: MockJob) -> None:
        self._server, self._body, self._job = server, body, job
        self._chat = path.endswith("chat/completions")
        self._prompt = str(body.get("prompt") or body.get("messages"))
        seed = body.get("seed")
        seed = server._count if seed is None else seed
        self._words = server.model.write(self._prompt, job.total, _temperature(body), seed)

    async def stream(self, send: Send, truncate: bool) -> None:
        streaming = bool(self._body.get("stream"))
        if streaming:
            await _start(send, 200, b"text/event-stream")
        done, cut = 0, len(self._words) // 2
        while count := await self._job.deltas.get():
            part = self._words[done : done + count]
            done += count
            if streaming:
                ended = done >= len(self._words)
                await _more(send, self._event(done - count, part, ended))
            if truncate and done >= cut:
                raise ConnectionResetError("cut by MockFaults.truncate_every")
        last = {"id": self._job.request_id, "choices": [], **self._ending(len(self._words))}
        if streaming:
            frames = b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
            await _more(send, frames, more=False)
            return
        last["choices"] = [self._choice(0, self._words, True)]
        await _reply(send, 200, json.dumps(last).encode())

    def _event(self, at: int, words: list[int], ended: bool) -> bytes:
        event = {"id": self._job.request_id, "choices": [self._choice(at, words, ended)]}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def _choice(self, at: int, words: list[int], ended: bool) -> dict[str, Any]:
        text = "".join(" " + WORDS[word] for word in words)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if ended else None}
        if self._chat:
            choice["delta" if self._body.get("stream") else "message"] = {"content": text}
        else:
            choice["text"] = text
        if self._body.get("return_token_ids"):
            choice["token_ids"] = words
        if self._body.get("logprobs") and not self._chat:
            choice["logprobs"] = self._logprobs(at, words)
        return choice

    def _logprobs(self, at: int, words: list[int]) -> dict[str, Any]:
        before = [-1, *self._words]
        model, count = self._server.model, int(self._body["logprobs"])
        tops = [model.top(self._prompt, before[at + i], count) for i in range(len(words))]
        return {"tokens": [" " + WORDS[word] for word in words], "top_logprobs": tops}

    def _ending(self, total: int) -> dict[str, Any]:
        prompt = len(self._prompt.split())
        found: dict[str, Any] = {"usage": {"prompt_tokens": prompt, "completion_tokens": total}}
        drafted, accepted = self._job.drafted, self._job.accepted
        if drafted and not self._server.faults.no_metrics:
            histogram = [accepted.count(j) for j in range(self._server.law.k + 1)]
            found["metrics"] = {
                "speculative_decoding": {
                    "num_draft_tokens": sum(drafted),
                    "num_accepted_draft_tokens": sum(accepted),
                    "num_spec_steps": len(drafted),
                    "num_spec_tokens": self._server.law.k,
                    "acceptance_histogram": histogram,
                    "per_step_accepted": accepted,
                    "per_step_drafted": drafted,
                }
            }
        return found


def _temperature(body: dict[str, Any]) -> float:
    value = body.get("temperature")
    return 1.0 if value is None else float(value)


async def _read(receive: Receive) -> dict[str, Any]:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            value = json.loads(body or b"{}")
            return value if isinstance(value, dict) else {}


async def _start(send: Send, status: int, kind: bytes) -> None:
    headers = [(b"content-type", kind)]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _more(send: Send, body: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def _reply(send: Send, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await _start(send, status, kind)
    await _more(send, body, more=False)
