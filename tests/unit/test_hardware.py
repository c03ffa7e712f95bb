"""What is read of the machine. The guarded bugs: a container's limits are not seen, a system that
says nothing of itself ends the program."""

import ctypes
import os
from pathlib import Path

import pytest

from foretoken import hardware
from foretoken.hardware import Hardware, anonymous_memory, usable_cores


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /: what is not written there is not there."""
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    return tmp_path


def write(root: Path, **contents: str) -> None:
    """`cpu_max`: the cgroup's cpu.max, and so on."""
    for name, content in contents.items():
        folder = root / ("proc" if name in ("cpuinfo", "meminfo") else "sys/fs/cgroup")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("_", ".")).write_text(content)


def cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_of_a_container(
    quota: str, expected: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(8, monkeypatch)
    write(files, cpu_max=quota)
    assert usable_cores() == expected


def test_memory_of_a_container(files: Path) -> None:
    write(files, meminfo="MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert Hardware.detect().free_memory == 4000 << 10
    write(files, memory_max="max", memory_current="5")
    assert Hardware.detect().free_memory == 4000 << 10
    write(files, memory_max="3000000", memory_current="1000000")
    assert Hardware.detect().free_memory == 2_000_000
    write(files, memory_current="4000000")
    assert Hardware.detect().free_memory == 0, "more is used than is allowed"


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx2", False), ("fpu avx512_bf16", True), ("amx_bf16", True)]
)
def test_what_the_processor_can(flags: str, expected: bool, files: Path) -> None:
    write(files, cpuinfo=f"model name\t: A CPU\nflags\t: {flags}\n\nmodel name\t: other\n")
    found = Hardware.detect()
    assert found.cpu_name == "A CPU" and found.has_bf16 is expected


@pytest.mark.parametrize(("features", "expected"), [("asimd bf16 i8mm", True), ("asimd", False)])
def test_what_an_arm_processor_can(features: str, expected: bool, files: Path) -> None:
    write(files, cpuinfo=f"processor\t: 0\nFeatures\t: {features}\n")
    assert Hardware.detect().has_bf16 is expected


def test_a_system_that_says_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    found = Hardware.detect()
    assert (found.cpu_name, found.num_cores, found.cpu_flags) == ("unknown", 1, frozenset())
    assert found.free_memory == 8 << 30
    assert anonymous_memory() is None


def test_without_glibc_the_heap_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with hardware.lean_heap():
        pass
