"""A process that shares the model dies or is stopped: all requests end with a reason, within 10 s,
and nothing stays behind, whether the engine was in the middle of a step or had nothing to do.
"""

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.engine.thread import AsyncEngine, OutputStream
from foretoken.errors import RankLostError
from foretoken.testing import write_tiny_llama
from foretoken.types import FinishReason, Output
from tests.e2e.lossless import follower_of
from tests.e2e.serving import start_server
from tests.marks import needs_kernels

ENDS_S = 10.0
"""The promise."""
BUSY_S = 5.0
"""What a machine with other work may add to it."""
KINDS = ("tensor_parallel_size", "pipeline_parallel_size")
HARMS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
SAID = {"killed": "rank 1 has died", "stopped": "rank 1 (has given no sign of life|did not answer)"}
"""A step has a deadline, too, and a small one may be the first to end."""
PARAMS = SamplingParams(max_tokens=3000, ignore_eos=True, temperature=0.0)
"""Longer than anybody waits before the harm."""

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("lost") / "model", max_position_embeddings=4096)


async def _ends(stream: OutputStream) -> list[Output]:
    return [one async for outputs in stream.batches() for one in outputs if one.finish_reason]


async def _harm(llm: LLM, how: str, streams: int, after_s: float) -> None:
    """Harm rank 1 beside so many streams; they end, and the engine with them."""
    running = AsyncEngine(llm._engine)
    running.start()
    opened = [
        running.open(llm._engine.make_requests(f"r{i}", [1 + i, 5, 9], PARAMS))
        for i in range(streams)
    ]
    reading = [asyncio.create_task(_ends(stream)) for stream in opened]
    await asyncio.sleep(after_s)
    began = time.monotonic()
    os.kill(follower_of(llm), HARMS[how])
    async with asyncio.timeout(ENDS_S + BUSY_S):
        ends = [one for task in reading for one in await task]
        while running.lost is None:
            await asyncio.sleep(0.05)
    print(f"{how} beside {streams} streams: ended after {time.monotonic() - began:.2f} s")
    assert isinstance(running.lost, RankLostError) and re.search(SAID[how], str(running.lost))
    assert [one.finish_reason for one in ends] == [FinishReason.ERROR] * streams
    assert all(re.search(SAID[how], str(one.error)) for one in ends)
    await running.stop()


def _lose(folder: Path, how: str, streams: int, after_s: float, kind: str) -> None:
    settings: dict[str, Any] = {kind: 2, "kv_cache_memory_bytes": 8 << 20}
    with LLM(str(folder), **settings) as llm:
        process = follower_of(llm)
        asyncio.run(_harm(llm, how, streams, after_s))
    assert not Path(f"/proc/{process}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how", "streams"),
    [(KINDS[0], "stopped", 3), (KINDS[0], "killed", 0), (KINDS[0], "killed", 3),
     (KINDS[1], "stopped", 0), (KINDS[1], "killed", 3)],
)  # fmt: skip
def test_every_request_ends_with_a_reason(folder: Path, kind: str, how: str, streams: int) -> None:
    _lose(folder, how, streams, 0.05, kind)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("streams", [3, 0])
@pytest.mark.parametrize("how", HARMS)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_times(folder: Path, kind: str, how: str, streams: int) -> None:
    """At moments that differ, and the next engine starts at once."""
    draw = random.Random(streams)
    for _ in range(20):
        _lose(folder, how, streams, draw.uniform(0.0, 0.15), kind)


def _serve(
    tmp_path: Path, kind: str = "tensor_parallel_size"
) -> tuple[subprocess.Popen[str], str, list[Path]]:
    """A server of two ranks, and the processes that are ranks of those that it started."""
    options = (f"--{kind.replace('_', '-')}", "2", "--kv-cache-memory-bytes", "40000000")
    process, url = start_server(*options, log=tmp_path / "log")
    started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [Path("/proc", number) for number in started]
    return process, url, [one for one in ranks if b"foretoken.text" not in _command(one)]


def _command(process: Path) -> bytes:
    """What fills chat templates is a process of the server, and no rank."""
    return (process / "cmdline").read_bytes()


def _takes_connections(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as trial:
        return trial.connect_ex((str(parts.hostname), int(parts.port or 0))) == 0


@pytest.mark.slow
def test_an_idle_server_ends_with_1_when_a_rank_is_stopped(tmp_path: Path) -> None:
    process, url, [rank] = _serve(tmp_path)
    try:
        os.kill(int(rank.name), signal.SIGSTOP)
        assert process.wait(ENDS_S + 2 * BUSY_S) == 1
    finally:
        process.kill()
        process.communicate()
    assert not rank.exists() and not _takes_connections(url)
    assert re.search(SAID["stopped"], (tmp_path / "log").read_text())


def _kill_server(tmp_path: Path, kind: str) -> None:
    """In the middle of a stream; the other rank leaves by itself."""
    process, url, [rank] = _serve(tmp_path, kind)
    body: dict[str, Any] = {"prompt": "a", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    try:
        with (
            pytest.raises(httpx.RemoteProtocolError),
            httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.kill()
            list(lines)
    finally:
        process.kill()
        process.communicate()
    began = time.monotonic()
    until = began + ENDS_S + BUSY_S
    while rank.exists() and " Z " not in (rank / "stat").read_text():
        assert time.monotonic() < until, rank
        time.sleep(0.05)
    print(f"rank 0 killed: the other had left after {time.monotonic() - began:.2f} s")
    assert not _takes_connections(url)


@pytest.mark.slow
def test_no_rank_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    _kill_server(tmp_path, "tensor_parallel_size")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rank_outlives_twenty_servers(tmp_path: Path, kind: str) -> None:
    for _ in range(20):
        _kill_server(tmp_path, kind)
