"""Replicas that Ray Serve starts, as a user starts them: `foretoken serve demo --replicas 2`.

`make test-ray` runs these; elsewhere they are skipped, for Ray is in no environment of the other
tests. What does not need Ray is in `test_replicas.py`. The guarded bugs: a replica that is not
started again, one that is not found by the front, processes that outlive the command.
"""

import importlib.util
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
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
EPISODES = 3
AS_IT_IS = ("-m", "foretoken")
ON_NODES = (
    "import sys; from pathlib import Path; from foretoken import placement\n"
    "placement.NODES = Path(sys.argv.pop(1)); from foretoken.cli import main; main()"
)
IN_A_HURRY = (
    "from foretoken.replicas import on_ray; on_ray.MORE_AFTER_S = on_ray.FEWER_AFTER_S = 2.0\n"
    "from foretoken.cli import main; main()"
)


def bodies(count: int, length: int = LENGTH) -> list[dict[str, Any]]:
    common = {"max_tokens": length, "ignore_eos": True, "return_token_ids": True}
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
    page = httpx.get(url + "/metrics", timeout=30).text
    return int(float(re.findall(r"^foretoken:replicas (\S+)", page, re.MULTILINE)[0]))


def wait_for(url: str, count: int, seconds: float) -> None:
    until = time.monotonic() + seconds
    while ready(url) != count:
        assert time.monotonic() < until, f"{ready(url)} replicas after {seconds:g} s"
        time.sleep(0.5)


@contextmanager
def served(
    *arguments: str, program: tuple[str, ...] = AS_IT_IS
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
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


def kill_one(process: "subprocess.Popen[str]", begun: threading.Event, which: int) -> float:
    begun.wait(60)
    running = sorted(replicas_of(process))
    os.kill(running[which % len(running)], signal.SIGKILL)
    return time.monotonic()


def two_again_s(url: str, killed: "Future[float]") -> float:
    """Seconds until there was another one."""
    wait_for(url, 1, BACK_S)
    wait_for(url, 2, BACK_S)
    return time.monotonic() - killed.result()


def check(asked: list[dict[str, Any]], before: list[Streamed], after: list[Streamed]) -> None:
    """No request is lost and no token comes twice; what is repeatable was not changed."""
    for body, one, other in zip(asked, before, after, strict=True):
        assert other.status == 200 and other.ended, body
        assert len(other.ids) == body["max_tokens"], body
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
    program = ("-c", ON_NODES, str(tmp_path))

    def kept_to() -> list[set[int]]:
        found = []
        for pid in replicas_of(process):
            with suppress(ProcessLookupError):  # it has just ended
                found.append(os.sched_getaffinity(pid))
        return sorted(found, key=min)

    with served("--replicas", "numa", *SMALL, program=program) as (process, url):
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


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_one_replica_after_the_other_is_killed_under_many_clients() -> None:
    asked, pauses, back = bodies(CLIENTS), list[float](), list[float]()
    with served("--replicas", "2", *SMALL) as (process, url):
        before = all_at_once(url, asked, threading.Event())
        for number in range(ROUNDS):
            begun = threading.Event()
            with ThreadPoolExecutor(2) as beside:
                killed = beside.submit(kill_one, process, begun, number)
                replaced = beside.submit(two_again_s, url, killed)
                after = all_at_once(url, asked, begun)
                back.append(replaced.result())
            check(asked, before, after)
            pauses += [one.pause_s(killed.result()) for one in after]
            print(f"round {number}: {restarts(url):.0f} requests were begun again so far")
        assert restarts(url) >= ROUNDS
    middle, longest = statistics.median(pauses), max(pauses)
    print(f"longest pause of a stream: median {middle:.2f} s, most {longest:.2f} s")
    print(f"another replica was there after {min(back):.1f} to {max(back):.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("drain_s", [300, 1], ids=["they end there", "they go on elsewhere"])
def test_a_replica_that_has_to_go_loses_no_stream(drain_s: int) -> None:
    """By load: another one comes with it, and goes without it while it still streams."""
    asked, ending = bodies(8, length=1500), threading.Event()

    def keep_asking(body: dict[str, Any]) -> None:
        while not ending.is_set():
            stream(url, COMPLETIONS, body)

    def come_and_go() -> None:
        """A second replica for a crowd, and then work for one alone until one of them is gone."""
        assert ready(url) == 1
        ending.clear()
        with ThreadPoolExecutor(CLIENTS) as pool:
            busy = [pool.submit(keep_asking, body) for body in bodies(CLIENTS, length=1000)]
            try:
                wait_for(url, 2, BACK_S)
            finally:
                ending.set()
            for one in busy:
                one.result()
        rounds = 0
        until = time.monotonic() + 2 * BACK_S
        while ready(url) == 2:
            assert time.monotonic() < until, "nobody went"
            check(asked, before, all_at_once(url, asked, threading.Event()))
            rounds += 1
        print(f"it went in round {rounds}; {restarts(url):.0f} streams went on elsewhere")

    options = ("--replicas", "1", "--max-replicas", "2", "--drain-s", str(drain_s))
    with served(*options, *SMALL, program=("-c", IN_A_HURRY)) as (_, url):
        before = all_at_once(url, asked, threading.Event())
        # On a busy machine the one that goes may have nothing to do just then.
        for _ in range(EPISODES):
            come_and_go()
            if drain_s > 1 or restarts(url) > 0:
                break
        assert (restarts(url) > 0) == (drain_s == 1)
        check(asked, before, all_at_once(url, asked, threading.Event()))
