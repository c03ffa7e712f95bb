"""An OpenAI-style server without a model: known latencies, known acceptance, faults on demand.

A Starlette application around a MockEngine: /v1/completions, /v1/chat/completions, /v1/models,
/version, /health, vLLM-style /metrics and per-request numbers, and /mock/timings with when tokens
really left. For tests, and to try the lab without a model: `python -m tests.mock_server` serves it
until interrupted, `mock_running` in a thread while a block lasts.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from foretoken.lab.http.listening import bind, serving
from foretoken.lab.http.timed import now
from tests.mock_server.faults import MockFaults, in_stretch, strikes
from tests.mock_server.generator import MockEngine, MockJob, MockLaw, MockModel, Timing
from tests.mock_server.prefixes import SeenPrefixes
from tests.mock_server.writing import (
    MockAnswer,
    MockToken,
    MockWriter,
    length_of,
    prompt_of,
    temperature_of,
    tokens_of,
)


class MockServer:
    def __init__(
        self, law: MockLaw, model: MockModel | None = None, faults: MockFaults | None = None
    ) -> None:
        self.law = law
        self.model, self.faults = model or MockModel(), faults or MockFaults()
        self.timings: list[Timing] = []
        self.count = 0
        self.prefixes = SeenPrefixes()
        self._open: dict[str, str] = {}
        """Prompts of answers that are on their way."""
        self._writer = MockWriter(model=self.model, faults=self.faults)
        self._engine: MockEngine | None = None
        self._task: asyncio.Task[None] | None = None
        self._app = Starlette(
            routes=[
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/models", _models),
                Route("/version", _version),
                Route("/health", _health),
                Route("/metrics", self._metrics_page),
                Route("/mock/timings", self._timings_page),
            ],
            exception_handlers={404: _not_found},
        )

    @property
    def engine(self) -> MockEngine:
        if self._engine is None:
            self._engine = MockEngine(self.law)
            self._task = asyncio.get_running_loop().create_task(self._engine.run())
        return self._engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await self._app(scope, receive, send)

    async def _metrics_page(self, request: Request) -> Response:
        if self.faults.no_metrics:
            return await _not_found(request)
        text = "\n".join(self._metrics()) + "\n"
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def _timings_page(self, _: Request) -> Response:
        return JSONResponse([asdict(timing) for timing in self.timings])

    def _metrics(self) -> Iterator[str]:
        e = self.engine
        spec = "vllm:spec_decode_num_"
        counters = {
            f"{spec}drafts": e.num_drafts,
            f"{spec}draft_tokens": e.num_drafted,
            f"{spec}accepted_tokens": e.num_accepted,
            "vllm:generation_tokens": e.num_tokens,
            "vllm:prefix_cache_queries": self.prefixes.num_queries,
            "vllm:prefix_cache_hits": self.prefixes.num_hits,
        }
        for name, value in counters.items():
            yield f'{name}_total{{model_name="mock"}} {value}'
            yield f'{name}_created{{model_name="mock"}} 1.7e9'
        yield f'vllm:kv_cache_usage_perc{{model_name="mock"}} {len(e.running) / 64:.4f}'

    def _due(self, every: int) -> bool:
        return every > 0 and self.count % every == 0

    async def _generate(self, request: Request) -> Response:
        given = json.loads(await request.body() or b"{}")
        body = given if isinstance(given, dict) else {}
        received = now()
        self.count += 1
        if self._due(self.faults.hang_every):
            await asyncio.sleep(3600)
        refused = [name for name in self.faults.refuse if body.get(name)]
        if refused:
            return _error(400, f"{refused[0]} is not supported")
        if self._due(self.faults.error_every):
            return _error(500, "the mock broke")
        k = length_of(body, self.law.k)
        if 0 < self.faults.longest < k:
            return _error(400, f"at most {self.faults.longest} draft tokens")
        others = tuple(self._open.values())
        written = self._writer.write(body, self.count, k=k, others=others)
        name, temperature = f"cmpl-{self.count}", temperature_of(body)
        self._open[name] = prompt_of(body)
        job = self.engine.submit(name, len(written.pieces), temperature, k)
        if in_stretch(self.faults.stuck_acceptance, self.count):
            job.alpha = -1.0
        if in_stretch(self.faults.sure_acceptance, self.count):
            job.alpha = 2.0
        talk = _MockReply(self, request.url.path, body, job, written)
        pieces = self._noted(talk.pieces(self._due(self.faults.truncate_every)), job, received)
        if body.get("stream"):
            return StreamingResponse(pieces, media_type="text/event-stream")
        return Response(b"".join([piece async for piece in pieces]), media_type="application/json")

    async def _noted(
        self, pieces: AsyncIterator[bytes], job: MockJob, received_s: float
    ) -> AsyncIterator[bytes]:
        """The pieces of an answer; when its tokens left is noted at the end, if there is one."""
        try:
            async for piece in pieces:
                yield piece
        finally:
            self.engine.abort(job)
            self._open.pop(job.request_id, None)
        self.timings.append(
            Timing(job.request_id, received_s, job.first_s, job.last_s, job.emitted)
        )


class _MockReply:
    def __init__(
        self, server: MockServer, path: str, body: dict[str, Any], job: MockJob, written: MockAnswer
    ) -> None:
        self._server, self._body, self._job, self._written = server, body, job, written
        self._chat = path.endswith("chat/completions")
        self._number = server.count
        faults = server.faults
        self._unscored = strikes(faults.unscored_drafts, "unscored", self._number)
        self._torn = strikes(faults.tear_stream, "stream", self._number)
        lost = strikes(faults.lose_prefix, "prefix", self._number)
        self._cached = server.prefixes.enter(prompt_of(body), lost=lost)

    async def pieces(self, truncate: bool) -> AsyncIterator[bytes]:
        """The body: events as steps end, or one piece for who does not stream."""
        streaming = bool(self._body.get("stream"))
        whole = self._written.pieces
        done, cut, sent = 0, len(whole) // 2, 0
        while count := await self._job.deltas.get():
            part = whole[done : done + count]
            done += count
            sent += 1
            if streaming and not (self._torn and sent == 2 and done < len(whole)):
                yield self._event(part, done >= len(whole))
            if truncate and done >= cut:
                raise ConnectionResetError("cut by MockFaults.truncate_every")
        last = {"id": self._job.request_id, "choices": [], **self._ending(len(whole))}
        if streaming:
            yield b"data: " + json.dumps(last).encode() + b"\n\ndata: [DONE]\n\n"
            return
        last["choices"] = [self._choice(whole, True)]
        yield json.dumps(last).encode()

    def _event(self, pieces: tuple[MockToken, ...], ended: bool) -> bytes:
        event = {"id": self._job.request_id, "choices": [self._choice(pieces, ended)]}
        return b"data: " + json.dumps(event).encode() + b"\n\n"

    def _choice(self, pieces: tuple[MockToken, ...], ended: bool) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        streaming = bool(self._body.get("stream"))
        reason = self._written.finish_reason if ended else None
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        if self._chat:
            key = "delta" if self._body.get("stream") else "message"
            choice[key] = self._message(text)
        else:
            choice["text"] = text
        if self._body.get("return_token_ids"):
            choice["token_ids"] = [piece.token_id for piece in pieces]
        if self._body.get("logprobs") and not self._chat:
            choice["logprobs"] = self._logprobs(pieces)
            if self._unscored:
                choice["logprobs"] = _without_drafts(choice["logprobs"], ended and not streaming)
        return choice

    def _message(self, text: str) -> dict[str, Any]:
        """A message, or what one event adds to it."""
        name = self._written.function
        if name is None:
            return {"content": text}
        call = {"id": self._job.request_id, "type": "function", "index": 0,
                "function": {"name": name, "arguments": text}}  # fmt: skip
        return {"content": None, "tool_calls": [call]}

    def _logprobs(self, pieces: tuple[MockToken, ...]) -> dict[str, Any]:
        count = int(self._body["logprobs"])
        return {
            "tokens": [piece.text for piece in pieces],
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": [piece.top(count) for piece in pieces],
        }

    def _ending(self, total: int) -> dict[str, Any]:
        miscounted = strikes(self._server.faults.miscount, "usage", self._number)
        usage = {
            "prompt_tokens": tokens_of(prompt_of(self._body)),
            "completion_tokens": total + 1 * miscounted,
            "prompt_tokens_details": {"cached_tokens": self._cached},
        }
        found: dict[str, Any] = {"usage": usage}
        drafted, accepted = self._job.drafted, self._job.accepted
        if drafted and not self._server.faults.no_metrics:
            histogram = [accepted.count(j) for j in range(self._job.k + 1)]
            found["metrics"] = {
                "speculative_decoding": {
                    "num_draft_tokens": sum(drafted),
                    "num_accepted_draft_tokens": sum(accepted),
                    "num_spec_steps": len(drafted),
                    "num_spec_tokens": self._job.k,
                    "acceptance_histogram": histogram,
                    "per_step_accepted": accepted,
                    "per_step_drafted": drafted,
                }
            }
        return found


def _without_drafts(rows: dict[str, Any], whole: bool) -> dict[str, Any] | None:
    """Log-probabilities of a server that scores no token of a step with drafts.

    Every second token of a whole answer has 0 and no likeliest tokens; an event of a stream that
    brings several tokens has no rows.
    """
    if not whole:
        return rows if len(rows["tokens"]) == 1 else None
    own = [value if at % 2 else 0.0 for at, value in enumerate(rows["token_logprobs"])]
    tops = [top if at % 2 else {} for at, top in enumerate(rows["top_logprobs"])]
    return {**rows, "token_logprobs": own, "top_logprobs": tops}


async def _models(_: Request) -> Response:
    return JSONResponse({"object": "list", "data": [{"id": "mock", "owned_by": "mock"}]})


async def _version(_: Request) -> Response:
    return JSONResponse({"version": "1"})


async def _health(_: Request) -> Response:
    return JSONResponse({})


async def _not_found(*_: object) -> Response:
    return _error(404, "no such path")


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message}}, status)


@contextmanager
def mock_running(app: ASGIApp) -> Iterator[str]:
    """Serve in a thread; gives the URL."""
    listener = bind(0)
    server = serving(app)
    told = threading.Event()

    async def until_told() -> None:  # uvicorn's own looks ten times a second
        await server.on_tick(0)
        await asyncio.to_thread(told.wait)

    server.main_loop = until_told  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        told.set()
        thread.join(timeout=10)
        listener.close()
