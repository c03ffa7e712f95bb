"""Runs the server until it is told to stop: sockets, signals, the lines printed at the start.

SIGTERM, SIGINT and SIGHUP: no new requests, running ones may finish, exit code 0. A lost engine:
exit code 1, after every open request was answered.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.config import EngineConfig
from foretoken.distributed.processes import Others
from foretoken.engine.engine import Engine
from foretoken.errors import ConfigError
from foretoken.extras import OptionalPackages
from foretoken.server.app import build_app, build_state
from foretoken.server.settings import ServerConfig
from foretoken.server.state import ServerState
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer
from foretoken.types import SamplingParams

if TYPE_CHECKING:
    from foretoken.server.observing.tracing import RequestSpans

logger = logging.getLogger("foretoken")
WARM_UP_S = 0.1
"""Of each kind of steps."""
SHORT_PAUSES = 700
"""New objects after which Python's collector looks at them, as it would by default."""


def serve(
    config: EngineConfig,
    server: ServerConfig,
    say: Callable[[str], None],
    others: Others | None = None,
) -> int:
    """Load the model, listen, and serve until a signal; the exit code.

    Args:
        config: the engine's settings.
        server: its own.
        say: takes the lines of the start.
        others: as `build_engine` takes them.

    Raises:
        ConfigError: a setting is wrong, or the port is taken.
        ModelError: the model is missing or broken.
    """
    with bound(server) as listening:
        spans = spans_of(server, config.model)
        from foretoken.engine.wiring import build_engine

        gc.freeze()  # what is imported: neither that nor, below, what is loaded is looked at again
        engine = build_engine(config, others=others)
        warm_up(engine)
        if (tokenizer := engine.parts.tokenizer) is not None:
            tokenizer.prepare_chat()
            logger.debug("a token covers at most %s characters", tokenizer.max_token_length)
        drain = Drain(server.limits.drain_s)
        state = build_state(engine, server, drain, spans)
        runner = DrainingServer(build_app(state), state.config.limits, state.engine, drain)
        # What is there now stays. Python's collector would look through all of it again and again,
        # for a quarter of a second in which no thread runs.
        gc.collect()
        gc.freeze()
        gc.set_threshold(SHORT_PAUSES)
        listening.listen()  # who reads the URL may connect at once
        with drained_by_signals(runner):
            for line in banner(state, listening):
                say(line)
            if not run_until_told(runner, listening):
                return 1
        return 0 if state.engine.stopped_cleanly else 1


def warm_up(engine: Engine) -> None:
    """First runs are slow: plain steps, then steps as they will be. A large model's step is long,
    and its first ones are little slower than others."""
    for policy, count in (({"enabled": False}, 8), (None, 24)):
        params = SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, speculation=policy
        )
        [request] = engine.make_requests("warm-up", [0], params)
        engine.rehearse(request, WARM_UP_S)


def spans_of(server: ServerConfig, model: str) -> "RequestSpans | None":
    """What makes OpenTelemetry spans, if they are wanted."""
    endpoint = server.otlp_traces_endpoint
    if endpoint is None:
        return None
    with OptionalPackages("--otlp-traces-endpoint"):
        from foretoken.server.observing.tracing import exported_to

    return exported_to(endpoint, server.names_of(model)[0])


def bound(server: ServerConfig) -> socket.socket:
    """A socket before the model is loaded, so that a taken port is known at once. Raises
    ConfigError: the port is taken."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only where a socket says that it is TCP; with it on, the
    # events of a stream wait for each other.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((server.host, server.port))
    except OSError as error:
        listening.close()
        given = f"{server.host}:{server.port}"
        raise ConfigError(
            "--host and --port", given, f"an address that is free ({error})"
        ) from error
    return listening


@contextmanager
def drained_by_signals(runner: DrainingServer) -> Iterator[None]:
    """Signals that ask for an end drain `runner` from here on; afterwards they are ignored, since
    the process ends anyway. SIGHUP is one of them unless it is ignored already, as under nohup."""
    heard = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        heard.append(signal.SIGHUP)
    for number in heard:
        signal.signal(number, runner.handle_exit)
    try:
        yield
    finally:
        for number in heard:  # Python ends with the default ones in force, if any were ours
            signal.signal(number, signal.SIG_IGN)


def run_until_told(runner: DrainingServer, listening: socket.socket) -> bool:
    """Serve until `runner` is drained; whether it began to."""
    asyncio.run(runner.serve(sockets=[listening]))
    return runner.started


def banner(state: ServerState, listening: socket.socket) -> list[str]:
    """What is served, where, with how much KV cache and which speculation."""
    parts = state.engine.engine.parts
    key = "asked for" if state.config.api_keys else "none"
    share = state.config.audit_share
    audited = f"Audit: {share:.3g} of all requests are decoded again without speculation, when idle"
    return [
        f"Serving {', '.join(state.model_names)} at {url_of(listening)}  (API at /v1, page at /)",
        parts.config.describe(),
        f"Speculation: {state.speculation}; API key: {key}; stop with Ctrl-C",
        *([audited] if share else []),
    ]


def url_of(listening: socket.socket) -> str:
    """Where a socket listens, as a browser takes it."""
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"
