"""The server as a process: killed and started again, its metrics under another prefix, its log."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken.lab.measure.servers import free_port
from tests.e2e.serving import start_server

BODY: dict[str, Any] = {
    "prompt": "class Stack:\n",
    "max_tokens": 40,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
}
SMALL = ("--max-num-seqs", "2", "--kv-cache-memory-bytes", "40000000")


def text_of(url: str) -> str:
    headers = {"x-request-id": "mine"}
    answer = httpx.post(url + "/v1/completions", json=BODY, headers=headers, timeout=60)
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
                json={**BODY, "max_tokens": 1500, "stream": True},
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
from foretoken.engine import Engine


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
            "POST", url + "/v1/completions", json={**BODY, "stream": True}, timeout=60
        ) as answer:
            text = answer.read().decode()
        assert '"internal_server_error"' in text and text.endswith("data: [DONE]\n\n"), text
        assert "cosmic" not in text
        assert process.wait(60) == 1
    finally:
        process.kill()
        process.communicate()
    assert "cosmic ray" in log.read_text() and "engine is lost" in log.read_text()
