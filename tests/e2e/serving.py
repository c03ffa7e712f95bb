"""A server in a thread of the test's own process, on any free port."""

import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from foretoken.engine.engine import Engine
from foretoken.server.app import build_app, build_state
from foretoken.server.observing.tracing import RequestSpans
from foretoken.server.run import bound
from foretoken.server.settings import ServerConfig
from foretoken.server.state import ServerState
from foretoken.server.transport.drain import Drain
from foretoken.server.transport.draining_server import DrainingServer


@dataclass(frozen=True)
class Serving:
    url: str
    state: ServerState
    runner: DrainingServer

    def wait_idle(self, seconds: float = 20.0) -> None:
        engine = self.state.engine
        until = time.monotonic() + seconds
        while engine.num_open or engine.engine.has_unfinished:
            assert time.monotonic() < until, f"{engine.num_open} requests are still open"
            time.sleep(0.01)
        assert engine.engine.parts.scheduler.kv_usage == 0.0


@contextmanager
def serving(
    engine: Engine, config: ServerConfig | None = None, spans: RequestSpans | None = None
) -> Iterator[Serving]:
    config = config or ServerConfig()
    drain = Drain(config.limits.drain_s)
    state = build_state(engine, config, drain, spans)
    runner = DrainingServer(build_app(state), state.config.limits, state.engine, drain)
    listening = bound(ServerConfig(port=0))
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
    thread.start()
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    try:
        while not runner.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.005)
        yield Serving(url, state, runner)
    finally:
        drain.begin()
        drain.begin()
        thread.join(30)
        listening.close()
    assert not thread.is_alive(), "the server did not stop"


def post(serving: Serving, path: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(serving.url + path, json=body, headers=headers, timeout=60)


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def start_server(
    *arguments: str,
    folder: Path | None = None,
    log: Path | None = None,
    descriptors: int | None = None,
    customize: Path | None = None,
) -> tuple[subprocess.Popen[str], str]:
    """`foretoken serve demo` in a process of its own, in `folder`, and its URL; `customize` is a
    folder with a `sitecustomize.py` for it."""
    own = ("--port", "0") if "--port" not in arguments else ()
    command = [sys.executable, "-m", "foretoken", "serve", "demo", *own, *arguments]
    if descriptors is not None:
        command = ["bash", "-c", f'ulimit -n {descriptors}; exec "$@"', "bash", *command]
    source = Path(__file__).parents[2] / "src"
    path = os.pathsep.join(str(one) for one in (customize, source) if one is not None)
    level = "ERROR" if log is None else "INFO"
    environment = {**os.environ, "PYTHONPATH": path, "FORETOKEN_LOGGING_LEVEL": level}
    with open(log or os.devnull, "w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=None if log is None else errors,
            text=True,
            env=environment,
            cwd=folder,
        )
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://\S+", line)
    assert found, line
    return process, found[0]
