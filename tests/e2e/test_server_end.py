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

from foretoken.lab.measure.servers import free_port
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


ASKED: dict[str, Any] = {
    "prompt": "class Stack:\n",
    "max_tokens": 40,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
}


def text_of(url: str) -> str:
    headers = {"x-request-id": "mine"}
    answer = httpx.post(url + "/v1/completions", json=ASKED, headers=headers, timeout=60)
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.mark.slow
def test_a_killed_server_starts_again_as_if_nothing_had_been(tmp_path: Path) -> None:
    """In the middle of a stream, then on the same port, and nothing is left in its folder."""
    port = str(free_port())
    process, url = start_server(*SMALL, "--port", port, folder=tmp_path)
    try:
        expected = text_of(url)
        with pytest.raises(httpx.RemoteProtocolError):
            with httpx.stream(
                "POST",
                url + "/v1/completions",
                json={**ASKED, "max_tokens": 1500, "stream": True},
                timeout=60,
            ) as answer:
                lines = answer.iter_lines()
                assert next(lines).startswith("data: {")
                process.kill()
                assert process.wait(10) == -9
                list(lines)
    finally:
        process.kill()
        process.communicate()
    assert not list(tmp_path.iterdir())
    log = tmp_path / "log"
    options = ("--port", port, "--metrics-prefix", "ours", "--log-format", "json")
    drafts = ("--spec-model", "demo-draft", "--spec-tokens", "3", "--no-adaptive-speculation")
    process, again = start_server(*SMALL, *options, *drafts, log=log)
    try:
        assert again == url
        assert text_of(url) == expected
        names = set(re.findall(r"^([a-z_]+:\w+)", httpx.get(url + "/metrics").text, re.M))
        assert {name.split(":")[0] for name in names} == {"vllm", "ours"}
        assert {"ours:drafting_seconds_total", "ours:request_acceptance_length_bucket",
                "ours:http_responses_total", "ours:device_memory_bytes"} <= names  # fmt: skip
        process.terminate()
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()
    logged = [json.loads(line) for line in log.read_text().splitlines()]
    own = [line["message"] for line in logged if line.get("request_id") == "mine"]
    assert own == ["accepted", "http"]
    [accepted] = [line for line in logged if line["message"] == "accepted"]
    [ended] = [line for line in logged if line["message"] == "ended"]
    assert 0 < ended["queued_ms"] <= ended["ttft_ms"] <= ended["e2e_ms"]
    assert ended["id"] == accepted["id"] and ended["completion_tokens"] == 40


LOSES = """
from foretoken.engine.engine import Engine


def broken(engine, arrive=None):
    outputs = step(engine, arrive)
    if any(output.request_id != "warm-up" for output in outputs):
        raise SystemError("cosmic ray")
    return outputs


step, Engine.step = Engine.step, broken
"""
"""A `sitecustomize` whose engine fails after the first step of a client's request, committed."""


@pytest.mark.slow
def test_a_lost_engine_ends_the_process_with_1(tmp_path: Path) -> None:
    """After every open request was answered, and without a word of the cause to clients."""
    (tmp_path / "sitecustomize.py").write_text(LOSES)
    log = tmp_path / "log"
    process, url = start_server(*SMALL, log=log, customize=tmp_path)
    try:
        with httpx.stream(
            "POST", url + "/v1/completions", json={**ASKED, "stream": True}, timeout=60
        ) as answer:
            text = answer.read().decode()
        assert '"internal_server_error"' in text and text.endswith("data: [DONE]\n\n"), text
        assert "cosmic" not in text
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.communicate()
    assert "cosmic ray" in log.read_text() and "engine is lost" in log.read_text()
