"""The front's application: our API in front of several replicas.

It checks keys, hosts and bodies as a server does (`foretoken.server`), says once whose a request
is (`RequestOrigin`), and has replicas do the rest. What is about one process alone, /admin, is not
offered.

A request's prompt is made for the router without a tokenizer (`prompt_of`). Texts that begin with
the same characters begin with the same tokens, but for the last one of what they share. So
stretches of text stand for tokens: `_BYTES` bytes for each, which is about what a token of English
is. Prompts of token ids are taken as they are. The names of pages are the front's own: replicas
have others for the same text. Of a long prompt the first `MOST_NAMED` pages have names, since it
costs its sender nothing and may be refused; what is alike so far goes together.
"""

import asyncio
import random
import time
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, final

import httpx
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from foretoken.errors import ForetokenError, ParameterError
from foretoken.replicas.relaying import Asked, RelayedAnswer, RelayParts, problem_from
from foretoken.router.prompt import RoutedPrompt
from foretoken.server.access import Access, as_response
from foretoken.server.endpoints import status
from foretoken.server.problems import Problem, draining
from foretoken.server.replica_protocol.origin import INTERNAL_HEADER, ORIGIN_HEADER, RequestOrigin
from foretoken.server.schemas import ChatBody, CompletionBody
from foretoken.server.settings import ServerConfig
from foretoken.server.state import request_id_of, salt_from
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.events import EventStream, json_response, to_json, unless_gone
from foretoken.server.transport.reading import as_body, read_json

PAGE = 32
"""Tokens of a page, or stretches of text."""
MOST_NAMED = 2048
"""Pages of a prompt that are looked at: 64 Ki tokens, 256 KiB of text."""
_ID = (1 << 63) - 1
"""What of a token id counts; what is beyond is refused by a replica."""
_BYTES = 4


def prompt_of(body: CompletionBody | ChatBody, salt: str | None) -> RoutedPrompt:
    """The prompt of a request within its salt; of several prompts the first, as all of one request
    go to one replica."""
    return RoutedPrompt.of(_pieces(body), salt, page_size=PAGE, most_pages=MOST_NAMED)


def _pieces(body: CompletionBody | ChatBody) -> Sequence[int]:
    if isinstance(body, ChatBody):
        return _of_text(_conversation(body))
    named = MOST_NAMED * PAGE
    prompt: Any = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_text(prompt.encode()) or [0]
    return [*(int(one) & _ID for one in prompt[:named]), *prompt[named:]] or [0]


def _conversation(body: ChatBody) -> bytes:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    messages = [to_json(message.model_dump(exclude_none=True)) for message in body.messages]
    return b"\n".join([to_json([body.template_variables, tools]), *messages])


def _of_text(text: bytes) -> Sequence[int]:
    """One number for every few bytes, the last filled up."""
    return array("I", text + bytes(-len(text) % _BYTES))


_KINDS: dict[str, type[CompletionBody | ChatBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
}
_METRICS_S = 5.0
_FIRST_S = 10.0
"""How long the start waits for a replica to answer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FrontState:
    """What the front's endpoints share."""

    config: ServerConfig
    parts: RelayParts
    draining: Drain
    internal_key: str
    noise: random.Random
    """Where requests get their noise from: the same sequence whoever serves them."""

    def headers(self, request: Request) -> dict[str, str]:
        """Those of a request to a replica."""
        origin = RequestOrigin(
            tenant=request.scope["foretoken.tenant"],
            answer=f"{random.SystemRandom().getrandbits(128):032x}",
            created=int(time.time()),
            noise=self.noise.getrandbits(64),
        )
        headers = {
            "content-type": "application/json",
            "x-request-id": request_id_of(request),
            INTERNAL_HEADER: self.internal_key,
            ORIGIN_HEADER: origin.model_dump_json(),
        }
        trace = request.headers.get("traceparent")
        return headers if trace is None else {**headers, "traceparent": trace}


def front_of(request: Request) -> FrontState:
    """The state of the app that serves `request`."""
    state: FrontState = request.app.state.front
    return state


def build_front(state: FrontState) -> ASGIApp:
    """The application; while it lives, replicas are looked for and asked how they are."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        members = state.parts.members
        watching = asyncio.create_task(members.run())
        await members.changed(asyncio.get_running_loop().time() + _FIRST_S)
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await state.parts.client.aclose()

    handlers = dict.fromkeys((HTTPException, Problem, ForetokenError, Exception), as_response)
    app = Starlette(routes=list(_ROUTES), lifespan=lifespan, exception_handlers=handlers)
    app.state.front = state
    paths = [route.path for route in _ROUTES]
    return Access(app, state.config, state.parts.metrics.http, paths)


async def generate(request: Request) -> ASGIApp:
    """Have a replica answer, whole or as a stream; another one goes on if it dies."""
    state, path = front_of(request), request.url.path
    limits = state.config.limits
    raw = await read_json(request, limits.max_body_bytes)
    body = as_body(raw, _KINDS[path])
    if body.resume is not None:
        allowed = "nothing: several replicas continue their streams themselves"
        raise ParameterError("resume", f"{len(body.resume)} outputs", allowed)
    if state.draining():
        raise draining()
    answer = RelayedAnswer(_asked(request, raw, body), state.parts)
    begun = False
    try:
        if not body.stream:
            whole = await unless_gone(request, answer.whole())
            return Response(whole, media_type="application/json")
        await unless_gone(request, answer.begin())
        begun = True
    finally:
        if not begun:
            await answer.close()
    return _Closing(answer, request_id_of(request), limits.client_timeout_s)


@final
class _Closing:
    """A stream whose answer is closed at its end, whatever the reason."""

    def __init__(self, answer: RelayedAnswer, request_id: str, timeout_s: float) -> None:
        self._answer = answer
        self._stream = EventStream(answer.events(), lambda: None, request_id, timeout_s)

    async def __call__(self, *given: Any) -> None:
        """Send it."""
        try:
            await self._stream(*given)
        finally:
            await self._answer.close()


def _asked(request: Request, raw: bytes, body: CompletionBody | ChatBody) -> Asked:
    state = front_of(request)
    limits = state.config.limits
    prompts = 1
    if isinstance(body, CompletionBody) and not isinstance(body.prompt, str):
        prompts = 1 if not body.prompt or isinstance(body.prompt[0], int) else len(body.prompt)
    return Asked(
        request_id=request_id_of(request),
        path=request.url.path,
        body=raw,
        headers=state.headers(request),
        prompt=prompt_of(body, salt_from(request.scope["foretoken.tenant"], body.cache_salt)),
        # More than may be asked for, or none, is refused by whoever gets it.
        choices=max(1, min(prompts * body.n, limits.max_n)),
        repeatable=body.temperature == 0 or body.seed is not None,
        deadline=asyncio.get_running_loop().time() + limits.timeout_s,
    )


async def pass_on(request: Request) -> Response:
    """Have any replica answer what all would answer alike."""
    state = front_of(request)
    members, client = state.parts.members, state.parts.client
    body = b""
    if request.method == "POST":
        body = await read_json(request, state.config.limits.max_body_bytes)
    tried: frozenset[str] = frozenset()
    while (replica := members.anyone(tried)) is not None:
        tried |= {replica.replica_id}
        try:
            answer = await client.request(
                request.method,
                f"{members.url(replica.replica_id)}{request.url.path}",
                content=body,
                headers=state.headers(request),
                timeout=state.config.limits.timeout_s,
            )
        except httpx.HTTPError:
            members.doubt(replica.replica_id)
            continue
        if not answer.is_success:
            raise problem_from(answer, answer.content)
        return Response(answer.content, media_type=answer.headers.get("content-type"))
    raise _nobody()


async def health(request: Request) -> Response:
    """200 while a request would find a replica; as /health, /health/ready."""
    state = front_of(request)
    if state.draining():
        raise draining()
    views = state.parts.members.views
    if all(view.draining for view in views):
        raise _nobody()
    return json_response({"status": "ready", "replicas": len(views)})


async def live(request: Request) -> Response:
    """200 while the process is worth keeping; as /health/live."""
    return json_response({"status": "live"})


async def metrics(request: Request) -> Response:
    """Prometheus text of the front and of every replica that answers."""
    state = front_of(request)
    members, client = state.parts.members, state.parts.client

    async def one(replica_id: str) -> tuple[str, str | None]:
        try:
            answer = await client.get(f"{members.url(replica_id)}/metrics", timeout=_METRICS_S)
        except httpx.HTTPError:
            return replica_id, None
        return replica_id, answer.text if answer.is_success else None

    found = await asyncio.gather(*(one(view.replica_id) for view in members.views))
    pages = {replica_id: text for replica_id, text in found if text is not None}
    rendered = await asyncio.to_thread(state.parts.metrics.render, pages)
    return Response(rendered, media_type=CONTENT_TYPE_LATEST)


async def no_admin(request: Request) -> Response:
    """What changes one process cannot be asked of several."""
    raise Problem(404, f"{request.url.path}: not built for several replicas", code="not_built")


def _nobody() -> Problem:
    headers = {"retry-after": "5"}
    return Problem(503, "no replica can answer just now", code="no_replica", headers=headers)


_ROUTES = (
    *(Route(path, generate, methods=["POST"]) for path in _KINDS),
    Route("/v1/models", pass_on),
    Route("/v1/models/{name:path}", pass_on),
    Route("/v1/embeddings", status.not_built, methods=["POST"]),
    Route("/v1/responses", status.not_built, methods=["POST"]),
    Route("/tokenize", pass_on, methods=["POST"]),
    Route("/detokenize", pass_on, methods=["POST"]),
    Route("/health", health),
    Route("/health/ready", health),
    Route("/health/live", live),
    Route("/ping", health),
    Route("/version", pass_on),
    Route("/metrics", metrics),
    Route("/control", pass_on),
    Route("/openapi.json", status.openapi),
    Route("/admin/{rest:path}", no_admin, methods=["GET", "PUT", "DELETE"]),
    Route("/", status.page),
    Route("/page/{name}", status.page),
)
