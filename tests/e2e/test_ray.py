"""Replicas that Ray Serve starts, as a user starts them: `foretoken serve demo --replicas 2`.

`make test-ray` runs these; elsewhere they are skipped, for Ray is in no environment of the other
tests. What does not need Ray is in `test_replicas.py`. The guarded bugs: a replica that is not
started again, one that is not found by the front, processes that outlive the command.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fronting import Streamed, stream
from tests.guards.sources import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-ray"
    ),
]

COMPLETIONS = "/v1/completions"
SMALL = ("--max-num-seqs", "16", "--kv-cache-memory-bytes", "64000000")
START_S, BACK_S, END_S = 180.0, 120.0, 60.0
LENGTH = 150
ROUNDS, CLIENTS = 10, 32
ON_NODES = (
    "import sys; from pathlib import Path; from foretoken import placement\n"
    "placement.NODES = Path(sys.argv.pop(1)); from foretoken.cli import main; main()"
)


def bodies(count: int) -> list[dict[str, Any]]:
    """Requests: greedy, seeded and, last, two without a seed."""
    common = {"max_tokens": LENGTH, "ignore_eos": True, "return_token_ids": True}
    found: list[dict[str, Any]] = []
    for number in range(count):
        prompt = f"def f{number}(x):\n    return "
        chosen = {"temperature": 0} if number % 2 else {"seed": number, "temperature": 0.9}
        found.append({**common, **chosen, "prompt": prompt})
    for body in found[-2:]:
        body.pop("seed", None)
        body["temperature"] = 1.0
    return found


def children(pid: int) -> dict[int, str]:
    """Processes below one, with their command lines."""
    parents, names = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                stat = (folder / "stat").read_text().rpartition(")")[2].split()
                names[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            parents[int(folder.name)] = int(stat[1])
    below: set[int] = {pid}
    while more := {child for child, parent in parents.items() if parent in below} - below:
        below |= more
    return {child: names[child] for child in below - {pid}}


def replicas_of(process: "subprocess.Popen[str]") -> list[int]:
    found = children(process.pid).items()
    return [pid for pid, name in found if "ServeReplica" in name]


def ready(url: str) -> int:
    """How many replicas can be asked."""
    page = httpx.get(url + "/metrics", timeout=30).text
    return int(float(re.findall(r"^foretoken:replicas (\S+)", page, re.MULTILINE)[0]))


def wait_for(url: str, count: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while ready(url) != count:
        assert time.monotonic() < until, f"{ready(url)} replicas after {seconds:g} s"
        time.sleep(0.5)


@contextmanager
def served(
    *arguments: str, nodes: Path | None = None
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """The command, and the address that it prints; `nodes` in the place of the machine's own."""
    program = ["-m", "foretoken"] if nodes is None else ["-c", ON_NODES, str(nodes)]
    command = [sys.executable, *program, "serve", "demo", "--port", "0", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next((m[0] for line in lines if (m := re.search(r"http://\S+", line))), None)
        assert url is not None, "it ended before it served"
        timer.cancel()
        yield process, url
    finally:
        timer.cancel()
        process.kill()
        process.communicate()


def all_at_once(url: str, asked: list[dict[str, Any]], begun: threading.Event) -> list[Streamed]:
    def seen(chunks: int) -> None:
        if chunks == LENGTH // 5:
            begun.set()

    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda body: stream(url, COMPLETIONS, body, seen=seen), asked))


def kill_one(process: "subprocess.Popen[str]", begun: threading.Event, which: int) -> None:
    begun.wait(60)
    running = sorted(replicas_of(process))
    os.kill(running[which % len(running)], signal.SIGKILL)


def check(asked: list[dict[str, Any]], before: list[Streamed], after: list[Streamed]) -> None:
    """No request is lost and no token comes twice; what is repeatable was not changed."""
    for body, one, other in zip(asked, before, after, strict=True):
        assert other.status == 200 and other.ended, body
        assert len(other.ids) == LENGTH, body
        if body["temperature"] == 0 or "seed" in body:
            assert other.by_choice == one.by_choice, body


def restarts(url: str) -> float:
    page = httpx.get(url + "/metrics", timeout=30).text
    return sum(map(float, re.findall(r"request_restarts_total\{.*\} (\S+)", page)))


def test_a_killed_replica_is_replaced_and_nobody_notices() -> None:
    asked = bodies(8)
    with served("--replicas", "2", *SMALL) as (process, url):
        wait_for(url, 2, 10.0)
        assert len(replicas_of(process)) == 2
        before = all_at_once(url, asked, threading.Event())
        begun = threading.Event()
        with ThreadPoolExecutor(1) as beside:
            killed = beside.submit(kill_one, process, begun, 0)
            after = all_at_once(url, asked, begun)
            killed.result()
        check(asked, before, after)
        assert restarts(url) > 0, "it was killed too late"
        wait_for(url, 2, BACK_S)
        page = httpx.get(url + "/metrics", timeout=30).text
        assert len(set(re.findall(r'vllm:kv_cache_usage_perc\{.*replica="(\w+)"', page))) == 2
        below = children(process.pid)
        process.terminate()
        assert process.wait(END_S) == 0
        until = time.monotonic() + END_S
        while any(Path(f"/proc/{pid}").exists() for pid in below):
            assert time.monotonic() < until, "Ray outlives the command"
            time.sleep(0.2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_each_replica_keeps_to_a_node_also_after_it_was_started_again(tmp_path: Path) -> None:
    """Nodes of one core each that this machine is said to have."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    for node, core in enumerate(cores):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(f"{core}\n")

    def kept_to() -> list[set[int]]:
        found = []
        for pid in replicas_of(process):
            with suppress(ProcessLookupError):  # it has just ended
                found.append(os.sched_getaffinity(pid))
        return sorted(found, key=min)

    with served("--replicas", "numa", *SMALL, nodes=tmp_path) as (process, url):
        wait_for(url, 2, 10.0)
        assert kept_to() == [{core} for core in cores]
        killed = replicas_of(process)[0]
        os.kill(killed, signal.SIGKILL)
        until = time.monotonic() + BACK_S
        while killed in replicas_of(process) or kept_to() != [{core} for core in cores]:
            assert time.monotonic() < until, kept_to()
            time.sleep(0.5)
        wait_for(url, 2, BACK_S)
        [found] = all_at_once(url, bodies(3)[:1], threading.Event())
        assert len(found.ids) == LENGTH


def test_a_model_that_is_not_there_is_said_at_once() -> None:
    command = [sys.executable, "-m", "foretoken", "serve", "./nothing", "--replicas", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 3 and "./nothing" in done.stderr


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_one_replica_after_the_other_is_killed_under_many_clients() -> None:
    asked = bodies(CLIENTS)
    with served("--replicas", "2", *SMALL) as (process, url):
        before = all_at_once(url, asked, threading.Event())
        for number in range(ROUNDS):
            wait_for(url, 2, BACK_S)
            begun = threading.Event()
            with ThreadPoolExecutor(1) as beside:
                killed = beside.submit(kill_one, process, begun, number)
                after = all_at_once(url, asked, begun)
                killed.result()
            check(asked, before, after)
            print(f"round {number}: {restarts(url):.0f} requests were begun again so far")
        assert restarts(url) >= ROUNDS


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_replicas_come_with_the_load_and_go_without() -> None:
    """Up after half a minute of load; that they go takes ten minutes, which nobody waits for."""
    ending = threading.Event()

    def keep_asking(url: str, body: dict[str, Any]) -> None:
        while not ending.is_set():
            stream(url, COMPLETIONS, {**body, "max_tokens": 1000})

    with served("--replicas", "1", "--max-replicas", "2", *SMALL) as (_, url):
        assert ready(url) == 1
        with ThreadPoolExecutor(CLIENTS) as pool:
            asking = [pool.submit(keep_asking, url, body) for body in bodies(CLIENTS)]
            try:
                wait_for(url, 2, 2 * BACK_S)
            finally:
                ending.set()
            for one in asking:
                one.result()
