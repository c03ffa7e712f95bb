"""How the server stops: nobody it accepted is left without a reason; and few descriptors."""

import json
import re
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import start_server

SMALL = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "40000000")
BODY = {"prompt": "x = ", "max_tokens": 300, "temperature": 0, "ignore_eos": True}
ENDLESS = {**BODY, "max_tokens": 1500, "n": 64}
TEXT = "/v1/completions"
UNFINISHED = (
    f"POST {TEXT} HTTP/1.1\r\nhost: localhost\r\n"
    "content-type: application/json\r\ncontent-length: 99\r\n\r\n{"
).encode()
"""A request whose body never comes."""
LATE = """
import os, signal, sys

class Late:
    def __del__(self, kill=os.kill, process=os.getpid(), number=signal.SIGTERM):
        kill(process, number)

sys.late = Late()
"""
"""A `sitecustomize` that has a signal come after Python has given up its own handlers."""


@contextmanager
def process_of(*options: str, **given: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process, url = start_server(*SMALL, *options, **given)
    try:
        yield process, url
    finally:
        process.kill()
        process.communicate()


def events(lines: Iterator[str]) -> list[str]:
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.slow
def test_sigterm_drains_and_exits_with_0() -> None:
    with process_of() as (process, url):
        body = {**BODY, "stream": True}
        with httpx.stream("POST", url + TEXT, json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            found = events(lines)
        assert found[-1] == "[DONE]"
        assert '"finish_reason":"length"' in found[-2]
        assert process.wait(30) == 0


@pytest.mark.slow
def test_everyone_is_told_when_the_drain_ends() -> None:
    """One stream, one plain request, one body that never comes; others ask meanwhile."""
    plain: list[httpx.Response] = []

    def ask(url: str) -> None:
        plain.append(httpx.post(url + TEXT, json=ENDLESS, timeout=60))

    with process_of("--drain-s", "2") as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        asking = threading.Thread(target=ask, args=(url,))
        streamed = {**ENDLESS, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", url + TEXT, json=streamed, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            asking.start()
            time.sleep(0.5)  # it is accepted
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            assert b"503" in slow.recv(10_000)
            health = httpx.get(url + "/health")
            assert health.status_code == 503 and "draining" in health.text
            refused = httpx.post(url + TEXT, json=BODY)
            assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "service_unavailable_error"
            assert refused.json()["error"]["code"] == "draining"
            assert httpx.get(url + "/health/live").status_code == 200
            assert time.monotonic() - began < 2, "too late to say anything"
            found = events(lines)
        asking.join()
        assert process.wait(30) == 0
    assert found[-1] == "[DONE]"
    assert json.loads(found[-2])["error"]["code"] == "draining"
    assert plain[0].status_code == 503
    assert plain[0].json()["error"]["code"] == "draining"


@pytest.mark.slow
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_second_signal_waits_for_nobody_and_a_slow_body_holds_nothing(
    first: signal.Signals, tmp_path: Path
) -> None:
    """Nor does a third one matter, while the process is being torn down."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    options = ("--drain-s", "600")
    with process_of(*options, customize=tmp_path) as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        with httpx.stream("POST", url + TEXT, json={**ENDLESS, "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(first)
            while httpx.get(url + "/health").status_code != 503:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            found = events(lines)
            assert found[-1] == "[DONE]"
            assert json.loads(found[-2])["error"]["code"] == "draining"
        assert process.wait(30) == 0
    with process_of("--drain-s", "600") as (process, url), connect(url) as slow:
        slow.sendall(UNFINISHED)
        assert httpx.get(url + "/health").status_code == 200
        process.terminate()
        assert process.wait(30) == 0


@pytest.mark.slow
def test_half_open_connections_are_not_let_use_all_descriptors(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_of(log=log, descriptors=64) as (_, url), ExitStack() as stack:
        for number in range(100):
            client = stack.enter_context(connect(url))
            client.sendall(b"GET /health HTTP/1.1\r\nhos" if number % 2 else b"")
        for _ in range(5):
            assert httpx.get(url + "/health", timeout=30).status_code == 200
        assert httpx.post(url + TEXT, json={**BODY, "max_tokens": 3}).status_code == 200
    assert len(log.read_text().splitlines()) < 50


@pytest.mark.slow
def test_without_descriptors_the_server_waits_and_says_so_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_of(log=log) as (process, url):
        used = len(list(Path(f"/proc/{process.pid}/fd").iterdir()))
        _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used + 5, hard))
        with ExitStack() as stack:
            for _ in range(60):
                stack.enter_context(connect(url))
            time.sleep(3)
        assert httpx.get(url + "/health", timeout=30).status_code == 200
    lines = log.read_text().splitlines()
    assert len([line for line in lines if re.search("connections wait", line)]) == 1
    assert len(lines) < 50
