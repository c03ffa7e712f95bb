"""Puts endpoints, middleware and state together into an ASGI application. Knows no socket."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from foretoken.engine.engine import Engine
from foretoken.engine.thread import AsyncEngine
from foretoken.errors import ConfigError, ForetokenError
from foretoken.extras import OptionalPackages
from foretoken.server.access import Access, as_response
from foretoken.server.auditor import auditor_of
from foretoken.server.endpoints import admin, chat, completions, status, tokens
from foretoken.server.observing.process_memory import keep_trimmed
from foretoken.server.observing.server_metrics import ServerMetrics, audit_families
from foretoken.server.problems import Problem
from foretoken.server.replica_protocol import report
from foretoken.server.replica_protocol.fingerprint import fingerprint_of
from foretoken.server.replica_protocol.pace import ServerPace
from foretoken.server.settings import ServerConfig
from foretoken.server.state import ServerState
from foretoken.server.transport.drain import Drain

if TYPE_CHECKING:
    from foretoken.server.observing.kv_events import KVEventPublisher
    from foretoken.server.observing.tracing import RequestSpans

ROUTES = (
    Route("/v1/models", status.models),
    Route("/v1/models/{name:path}", status.models),
    Route("/v1/completions", completions.completions, methods=["POST"]),
    Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
    Route("/v1/embeddings", status.not_built, methods=["POST"]),
    Route("/v1/responses", status.not_built, methods=["POST"]),
    Route("/tokenize", tokens.tokenize, methods=["POST"]),
    Route("/detokenize", tokens.detokenize, methods=["POST"]),
    *(Route(path, status.health) for path in ("/health", "/health/ready", "/ping")),
    Route("/health/live", status.live),
    Route("/version", status.version),
    Route("/metrics", status.metrics),
    Route("/control", status.control),
    Route("/openapi.json", status.openapi),
    Route(report.PATH, report.replica),
    Route("/admin/speculation", admin.read_speculation),
    Route("/admin/speculation", admin.write_speculation, methods=["PUT"]),
    Route("/admin/corpora", admin.list_corpora),
    Route("/admin/corpora/{name}", admin.put_corpus, methods=["PUT"]),
    Route("/admin/corpora/{name}", admin.delete_corpus, methods=["DELETE"]),
    Route("/", status.page),
    Route("/page/{name}", status.page),
)


_TRIMMED_EVERY_S = 10.0


def build_state(
    engine: Engine,
    config: ServerConfig,
    drain: Drain,
    spans: "RequestSpans | None" = None,
) -> ServerState:
    """The parts of a server around `engine`; `drain` begins if it is lost, `spans` sees every
    request."""
    name = config.names_of(engine.parts.config.user.model)[0]
    metrics = ServerMetrics(engine, name, config.metrics_prefix)
    pace = ServerPace(engine.parts.config.max_num_seqs)
    running = AsyncEngine(
        engine,
        max_buffered=config.limits.max_unread_tokens,
        observers=[metrics.observe, pace.observe],
        on_lost=drain.begin,
    )
    if spans is not None:
        running.observers.append(spans.observe)
    auditor = None
    if config.audit_share:
        auditor = auditor_of(running, config.audit_share)
        running.observers.append(auditor.observe)
        describe = auditor.describe
        metrics.scrape(lambda of: audit_families(describe(), of))
    return ServerState(
        config=config,
        engine=running,
        metrics=metrics,
        pace=pace,
        fingerprint=fingerprint_of(engine.parts.config),
        draining=drain,
        spans=spans,
        auditor=auditor,
        kv_events=_kv_events(engine, config),
    )


def _kv_events(engine: Engine, config: ServerConfig) -> "KVEventPublisher | None":
    """What tells of KV pages, if that is wanted. Raises ConfigError: there is no prefix cache to
    tell of, or an address is taken."""
    if not config.kv_events.is_on:
        return None
    parts = engine.parts
    if parts.scheduler.prefix is None:
        allowed = "on, beside --kv-events-config"
        raise ConfigError("--enable-prefix-caching", False, allowed)
    with OptionalPackages("--kv-events-config"):
        from foretoken.server.observing.kv_events import KVEventPublisher

    journal = parts.scheduler.prefix.keep_journal()
    medium = "CPU" if parts.config.device.startswith("cpu") else "GPU"
    size = parts.config.page_size
    return KVEventPublisher(journal, config.kv_events, page_size=size, medium=medium)


def build_app(state: ServerState) -> ASGIApp:
    """The application; its lifespan starts and stops the engine's thread."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        state.engine.start()
        if state.kv_events is not None:
            state.kv_events.start()
        beside = [asyncio.create_task(keep_trimmed(_TRIMMED_EVERY_S))]
        if state.auditor is not None:
            beside.append(asyncio.create_task(state.auditor.run()))
        yield
        for task in beside:
            task.cancel()
        state.close()
        await state.engine.stop()
        if state.kv_events is not None:
            await asyncio.to_thread(state.kv_events.close)
        if state.spans is not None:
            await asyncio.to_thread(state.spans.close)

    handlers = dict.fromkeys((HTTPException, Problem, ForetokenError, Exception), as_response)
    app = Starlette(routes=list(ROUTES), lifespan=lifespan, exception_handlers=handlers)
    app.state.foretoken = state
    return Access(app, state.config, state.metrics.http, [route.path for route in ROUTES])
