"""Starting to serve, and what a server says of itself. The guarded bugs: a model is loaded for a
port that is taken, an address that no browser reads, errors of the loop that fill the log."""

import asyncio
import errno
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.errors import ConfigError, MissingPackageError, ModelNotFoundError
from foretoken.server.app import build_app, build_state
from foretoken.server.problems import problem_of
from foretoken.server.run import banner, drained_by_signals, serve, warm_up
from foretoken.server.settings import ServerConfig
from foretoken.server.state import ServerState
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer
from foretoken.testing import write_tiny_llama
from foretoken.types import SamplingParams


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerState]:
    folder = write_tiny_llama(tmp_path_factory.mktemp("tiny"))
    engine = build_engine(
        EngineConfig.from_kwargs(model=str(folder), kv_cache_memory_bytes=1 << 20)
    )
    config = ServerConfig(served_model_names=("small", "tiny"), api_keys=("key",))
    made = build_state(engine, config, Drain(0.0))
    yield made
    made.close()


def test_a_taken_port_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    """There is no such model: nobody has looked for it yet."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nowhere = EngineConfig.from_kwargs(model=str(tmp_path / "nothing"))
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*an address that is free"):
            serve(nowhere, ServerConfig(port=port), print)


def test_nobody_learns_from_the_requests_that_warm_up(tmp_path: Path) -> None:
    """Served steps take longer, for all that is done around them."""
    drafter = write_tiny_llama(tmp_path / "draft")
    engine = build_engine(
        EngineConfig.from_kwargs(
            model=str(write_tiny_llama(tmp_path / "tiny")),
            kv_cache_memory_bytes=1 << 20,
            speculative_config={"model": str(drafter), "num_speculative_tokens": 2},
            adaptive_speculation=True,
        )
    )
    control = engine.parts.controller.control
    assert control is not None
    warm_up(engine)
    assert control.models()["target"]["steps"] == 0
    assert engine.parts.controller.journal is not None
    assert engine.parts.controller.journal.describe()["steps"] == 0
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    # What the first shows is learnt when the second is planned.
    for name in ("first", "second"):
        [request] = engine.make_requests(name, [0], params)
        engine.add_request(request)
        while engine.has_unfinished:
            engine.step()
    assert control.models()["target"]["steps"] > 0


def test_spans_that_cannot_be_made_are_known_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.delitem(sys.modules, "foretoken.server.observing.tracing", raising=False)
    server = ServerConfig(port=0, otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    nowhere = EngineConfig.from_kwargs(model=str(tmp_path / "nothing"))
    with pytest.raises(MissingPackageError, match=r"--otlp-traces-endpoint.*foretoken\[otel\]"):
        serve(nowhere, server, print)


def test_who_asks_while_it_drains_is_told_so(state: ServerState) -> None:
    drain = Drain(0.0)
    app = build_app(replace(state, draining=drain))

    async def ask() -> httpx.Response:
        transport, key = httpx.ASGITransport(app=app), {"authorization": "Bearer key"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"prompt": [1, 2], "max_tokens": 1}
            return await client.post("/v1/completions", json=body, headers=key)

    drain.begin()
    answer = asyncio.run(ask())
    assert answer.status_code == 503, answer.text
    assert answer.json()["error"]["code"] == "draining" and answer.headers["retry-after"]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Whatever a test does to them, they are as before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("handlers")
def test_signals_drain_then_end_the_waiting_then_do_nothing(
    state: ServerState, first: signal.Signals
) -> None:
    """From before anybody knows the URL until the process has gone."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    drain = Drain(600.0)
    runner = DrainingServer(build_app(state), state.config.limits, state.engine, drain)
    with drained_by_signals(runner):
        signal.raise_signal(first)
        assert [drain(), drain.is_over] == [True, False]
        signal.raise_signal(signal.SIGTERM)
        assert [drain(), drain.is_over] == [True, True]
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert signal.getsignal(number) is signal.SIG_IGN


@pytest.mark.usefixtures("handlers")
def test_under_nohup_a_lost_terminal_changes_nothing(state: ServerState) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    drain = Drain(600.0)
    runner = DrainingServer(build_app(state), state.config.limits, state.engine, drain)
    with drained_by_signals(runner):
        signal.raise_signal(signal.SIGHUP)
        assert not drain()


def test_the_address_that_is_printed(state: ServerState) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        first, _, last = banner(state, listening)
        port = listening.getsockname()[1]
    assert first.startswith(f"Serving small, tiny at http://127.0.0.1:{port} ")
    assert "API key: asked for" in last


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_an_address_of_version_6_is_in_brackets(state: ServerState) -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no address of version 6 here")
    with listening:
        assert f"http://[::1]:{listening.getsockname()[1]} " in banner(state, listening)[0]


def test_missing_descriptors_are_said_once_and_other_errors_always(
    state: ServerState, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[dict[str, Any]] = []
    loop = asyncio.new_event_loop()
    server = DrainingServer(build_app(state), state.config.limits, state.engine, Drain(0.0))
    monkeypatch.setattr(loop, "default_exception_handler", told.append)
    with caplog.at_level("ERROR", "foretoken"), closing(loop):
        for number in (errno.EMFILE, errno.EMFILE, errno.ENFILE, errno.EPIPE):
            server._on_trouble(loop, {"exception": OSError(number, "as it is")})
        server._on_trouble(loop, {"message": "something else"})
    assert caplog.text.count("connections wait to be accepted") == 1
    assert len(told) == 2


def test_a_models_troubles_on_disk_are_not_described() -> None:
    error = ModelNotFoundError("model", "/secret/folder", "a folder")
    found = problem_of(error)
    assert found.status == 500 and "secret" not in str(found.body("id"))
