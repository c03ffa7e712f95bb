"""Cores that a process keeps to. The guarded bugs: a list that is read as another one, a process
that goes on with all cores although it was told otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from foretoken import placement
from foretoken.errors import ConfigError
from foretoken.placement import cores_of, keep_to, keeps_to_one_node, numa_nodes, usable_nodes


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two nodes of cores and one of memory alone."""
    for node, text in {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n"}.items():
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(text)
    monkeypatch.setattr(placement, "NODES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", {0}), ("0-2", {0, 1, 2}), ("0-1,4-5", {0, 1, 4, 5}), ("3, 1,1", {1, 3})],
)
def test_lists(text: str, expected: set[int]) -> None:
    assert cores_of(text) == expected


@pytest.mark.parametrize("text", ["", "a", "2-1", "1-", "-1", "0,,1", "0-99999999999", "numa"])
def test_what_names_no_core(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        cores_of(text)


def test_nodes(nodes: Path) -> None:
    assert set(numa_nodes()) == {0, 1}
    assert cores_of("numa:1") == {4, 5, 6, 7, 12, 13, 14, 15}
    for missing in ("numa:2", "numa:", "numa:x"):
        with pytest.raises(ConfigError, match=r"numa: and one of 0, 1"):
            cores_of(missing)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (set(range(16)), {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}),
        ({2, 5}, {0: {2}, 1: {5}}),
        ({0, 1}, {0: {0, 1}}),
    ],
)
def test_nodes_of_what_is_allowed(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], expected: dict[int, set[int]]
) -> None:
    """By a container or `--cpus`; a node of which nothing is left is none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert usable_nodes() == expected
    assert keeps_to_one_node() == (len(expected) == 1)


def test_a_system_without_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "NODES", tmp_path)
    assert numa_nodes() == {0: frozenset(range(os.cpu_count() or 1))}
    assert not keeps_to_one_node()


def test_cores_that_are_not_allowed() -> None:
    most = max(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=str(most + 1)):
        keep_to(frozenset({most, most + 1}))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_started_before_and_later_keep_to_them() -> None:
    code = (
        "import os, sys, threading; from foretoken.placement import *; found = []\n"
        "done = threading.Event(); early = threading.Thread(target=done.wait, daemon=True)\n"
        "early.start()\n"
        "def look():\n"
        "    one = threading.Thread(target=lambda: found.extend(os.sched_getaffinity(0)))\n"
        "    one.start(); one.join()\n"
        "keep_to(cores_of(sys.argv[1]))\n"
        "import torch; look(); print(*found, *os.sched_getaffinity(early.native_id))\n"
        "print(torch.get_num_threads()); done.set()"
    )
    core = max(os.sched_getaffinity(0))
    source = str(Path(placement.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, str(core)],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert done.stdout.split() == [str(core), str(core), "1"]
