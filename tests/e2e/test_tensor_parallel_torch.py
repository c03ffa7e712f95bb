"""Several processes over PyTorch's operations: speculation changes no token of so many processes,
and one that is lost ends the engine with its name.

With the compiled kernels that is float16, which they do not take, else float32.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.kernels.library import find_library
from foretoken.testing import write_tiny_llama
from tests.e2e.lossless import PARAMETERS, Result, generate, make_prompts

DTYPE = "float32" if find_library() is None else "float16"
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4}
SPECULATION: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft model": DRAFT,
    "tree": {"method": "draft_model", "choices": [[0], [0, 0], [1], [1, 0]]},
}
RUNS = ("greedy", "seeded", "filters", "logprobs")
PRESSED: dict[str, Any] = {"max_num_batched_tokens": 24, "max_num_seqs": 5, "block_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("torch") / "model")


def run(folder: Path, ranks: int, speculation: str | None = None) -> dict[str, list[Result]]:
    config = None if speculation is None else dict(SPECULATION[speculation])
    if config is not None and config["method"] == "draft_model":
        config["model"] = str(folder)
    with LLM(
        str(folder),
        dtype=DTYPE,
        batch_invariant=True,
        tensor_parallel_size=ranks,
        kv_cache_memory_bytes=8 << 20,
        speculative_config=config,
        adaptive_speculation=False,
        **PRESSED,
    ) as llm:
        parameters = {name: {"max_tokens": 24, **PARAMETERS[name]} for name in RUNS}
        return {name: generate(llm, make_prompts(6, 3), parameters[name]) for name in RUNS}


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[dict[str, list[Result]]]:
    yield run(folder, 2)


@pytest.mark.slow
@pytest.mark.parametrize("speculation", SPECULATION)
def test_speculation_changes_no_token_of_two_processes(
    folder: Path, plain: dict[str, list[Result]], speculation: str
) -> None:
    assert run(folder, 2, speculation) == plain


WITHOUT_KERNELS = """
import os, signal, sys, time
from foretoken import LLM
from foretoken.errors import RankLostError
from foretoken.kernels.library import find_library

assert find_library() is None
prompt, settings = {"prompt_token_ids": [5, 6, 7]}, dict(kv_cache_memory_bytes=8 << 20)
with LLM(sys.argv[1], **settings) as alone:
    [wanted] = alone.generate([prompt], use_tqdm=False)
with LLM(sys.argv[1], tensor_parallel_size=2, **settings) as shared:
    [found] = shared.generate([prompt], use_tqdm=False)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
    engine = shared._engine
    [process] = engine.parts.followers.process_ids
    reading = shared.stream(prompt) if sys.argv[2] == "streaming" else iter(())
    next(reading, None)
    os.kill(process, signal.SIGKILL)
    until = time.monotonic() + 10.0
    try:
        list(reading)
        while time.monotonic() < until:
            engine.check()
    except RankLostError as error:
        print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["idle", "streaming"])
def test_without_kernels_a_killed_process_ends_the_engine(folder: Path, when: str) -> None:
    """Sockets have no heartbeats; lines tell who died."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNELS, str(folder), when],
        env={
            **os.environ,
            "FORETOKEN_KERNELS": "off",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "the process of rank 1 has died" in done.stdout
