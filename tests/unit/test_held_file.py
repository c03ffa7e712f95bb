"""A file that is mapped cannot be changed or cut under its reader.

The guarded bugs: a process ended by SIGBUS, weights that are another program's bytes.
"""

import fcntl
import mmap
import os
import signal
import threading
from pathlib import Path

import pytest

from foretoken.models import packed_file
from foretoken.models.packed_file import Lease

CONTENTS = bytes(range(256)) * 40
"""Not a whole number of pages."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_LOOK_S", 0.001)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(CONTENTS)
    return path


def taken(path: Path) -> tuple[Lease, mmap.mmap]:
    with path.open("rb") as opened:
        lease = Lease.take(opened.fileno())
        if lease is None:
            pytest.skip("this file system has no leases")
        return lease, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)


def watchers() -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == "held-file"]


def ask(path: Path) -> None:
    with pytest.raises(BlockingIOError):
        os.open(path, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize("harm", ["overwritten", "truncated", "emptied", "cut by name"])
def test_what_is_mapped_stays(
    file: Path, harm: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, mapped = taken(file)
    lease.guard(mapped, file.name)
    if harm == "overwritten":
        with file.open("r+b") as opened:
            opened.write(bytes(len(CONTENTS)))
    elif harm == "truncated":
        with file.open("r+b") as opened:
            opened.truncate(10)
    elif harm == "emptied":
        file.write_bytes(b"")
    else:
        os.truncate(file, 0)
    assert mapped[:] == CONTENTS
    assert "another program is about to change file" in caplog.text
    for watcher in watchers():
        watcher.join(60)
    mapped[0:1] = b"x"  # memory of its own
    mapped.close()


def test_what_does_no_harm_need_not_wait(file: Path) -> None:
    lease, mapped = taken(file)
    lease.guard(mapped, file.name)
    assert file.read_bytes() == CONTENTS
    other, beside = taken(file)
    os.utime(file)
    file.rename(file.with_name("another")).unlink()
    file.write_bytes(b"a new file of this name")
    assert not lease.is_wanted_back and not other.is_wanted_back
    assert mapped[:] == beside[:] == CONTENTS
    other.end()


def test_it_is_held_no_longer_than_it_is_mapped(file: Path) -> None:
    lease, mapped = taken(file)
    lease.guard(mapped, file.name)
    [watcher] = [one for one in watchers() if one.is_alive()][-1:]
    del mapped
    watcher.join(60)
    assert not watcher.is_alive()
    os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))


def test_who_has_no_memory_for_a_copy_ends_with_a_reason(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(_: mmap.mmap) -> None:
        raise OSError(12, "Cannot allocate memory")

    told: list[int] = []
    monkeypatch.setattr(packed_file, "_replace", none)
    monkeypatch.setattr(os, "kill", lambda _, number: told.append(number))
    lease, mapped = taken(file)
    ask(file)
    lease.guard(mapped, file.name)
    for watcher in watchers():
        watcher.join(60)
    assert told == [signal.SIGTERM]
    assert "no memory for a copy" in caplog.text
    ask(file)  # until the process has ended
    lease.end()


@pytest.mark.parametrize("why", ["no leases", "open for writing", "no time", "unknown time"])
def test_what_cannot_be_held(file: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lease, _ = taken(file)
    lease.end()
    if why == "no leases":
        monkeypatch.delattr(fcntl, "F_SETLEASE")
    elif why.endswith("time"):
        seconds = file.with_name("seconds")
        if why == "no time":
            seconds.write_text("5\n")
        monkeypatch.setattr(packed_file, "_BREAK_TIME", seconds)
    with file.open("r+b" if why == "open for writing" else "rb"), file.open("rb") as opened:
        before = os.listdir("/proc/self/fd")
        assert Lease.take(opened.fileno()) is None
        assert len(os.listdir("/proc/self/fd")) == len(before)
