"""`foretoken serve` as torchrun starts it: the processes find each other, write what one writes,
and leave together.

The guarded bugs: every process serves by itself, a process that outlives rank 0, an exit code that
torchrun takes for a failure, and processes of different launches that meet.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from tests.marks import needs_kernels

SERVE = ("-m", "foretoken", "serve")
PROMPT = [5, 9, 2, 7]
LEAVES_S = 30.0

pytestmark = needs_kernels


def arguments(model: Path, kind: str = "tensor") -> list[str]:
    sizes = (f"--{kind}-parallel-size", "2", "--kv-cache-memory-bytes", "8000000")
    return [*SERVE, str(model), *sizes, "--dtype", "float32", "--port", "0"]


def start(log: Path, *given: str, told: Mapping[str, str] | None = None) -> Any:
    path = {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with log.open("a") as file:
        return subprocess.Popen(
            [sys.executable, *given],
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **path, **(told or {})},
        )


def told(rank: int, port: int, size: int = 2) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def url_in(log: Path, process: "subprocess.Popen[bytes]") -> str:
    until = time.monotonic() + 120.0
    while not (found := re.search(r"Serving \S+ at (http://\S+)", log.read_text())):
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)
    return found[1]


def written(url: str) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(
        f"{url}/v1/completions", json={**body, "return_token_ids": True}, timeout=60
    )
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


@contextmanager
def ended(*processes: "subprocess.Popen[bytes]") -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
def test_torchrun_serves_what_one_process_writes(model: Path, tmp_path: Path, kind: str) -> None:
    with LLM(str(model), dtype="float32", kv_cache_memory_bytes=8 << 20) as alone:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        [result] = alone.generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    log = tmp_path / "log"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(log, *launcher, *arguments(model, kind))
    with ended(process):
        url = url_in(log, process)
        assert written(url) == list(result.outputs[0].token_ids)
        started = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = {environment(number)["RANK"]: int(number) for number in started}
        assert ranks.keys() == {"0", "1"}
        os.kill(ranks["1"], signal.SIGTERM)  # as torchrun passes it on; rank 0 says when to leave
        assert written(url) == list(result.outputs[0].token_ids)
        os.kill(ranks["0"], signal.SIGTERM)
        assert process.wait(LEAVES_S) == 0, log.read_text()
    assert log.read_text().count("Serving ") == 1
    assert not any(Path("/proc", number).exists() for number in started)


def environment(number: str) -> dict[str, str]:
    lines = Path("/proc", number, "environ").read_bytes().decode().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "codes"), [(0, (-9, 0)), (1, (1, -9))])
def test_processes_that_a_script_launched_end_together(
    model: Path, tmp_path: Path, lost: int, codes: tuple[int, int]
) -> None:
    log = tmp_path / "log"
    processes = [
        start(log, *arguments(model), told=told(rank, port=29400 + lost)) for rank in (1, 0)
    ][::-1]
    with ended(*processes):
        assert written(url_in(log, processes[0]))
        processes[lost].kill()
        assert tuple(one.wait(LEAVES_S) for one in processes) == codes, log.read_text()
