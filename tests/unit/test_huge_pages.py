"""Files in huge pages: pieces in small ones are read again, and nothing is asked for in vain."""

import mmap
import os
from pathlib import Path

import pytest

from foretoken.models import huge_pages
from foretoken.models.huge_pages import HUGE, bring_back_in_huge_pages, comes_in_huge_pages

needs_linux = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux's huge pages")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(1 << 20) * 41)
    return path


class Memory:
    """A system that has pieces in small pages until it forgets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, small: set[int], after: float) -> None:
        self.small, self.after, self.forgotten = small, after, list[int]()
        monkeypatch.setattr(huge_pages, "_PIECE", 8 << 20)
        monkeypatch.setattr(huge_pages, "_read_piece", self.read)
        monkeypatch.setattr(os, "posix_fadvise", self.forget)

    def read(self, fd: int, start: int, length: int) -> int:
        if start in self.forgotten:
            return int(length * self.after)
        return length - HUGE if start in self.small else length

    def forget(self, fd: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        self.forgotten.append(start)


def test_only_what_lies_in_small_pages_is_read_again(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, {0, 24 << 20}, after=1.0)
    assert bring_back_in_huge_pages(file)
    assert memory.forgotten == [0, 24 << 20]


def test_where_there_are_none_it_ends_after_a_little(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Memory(monkeypatch, set(range(0, 41 << 20, 8 << 20)), after=0.0)
    assert not bring_back_in_huge_pages(file)
    assert memory.forgotten == [0]


def test_a_system_that_does_not_know_them_is_asked_for_nothing(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS, where Python has neither the advice nor a way to forget."""
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    assert not bring_back_in_huge_pages(file)
    with file.open("rb") as opened:
        assert not comes_in_huge_pages(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))


@pytest.mark.slow
@needs_linux
def test_bytes_stay_and_the_answer_is_true(file: Path) -> None:
    before = file.read_bytes()
    held = bring_back_in_huge_pages(file)
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    assert comes_in_huge_pages(mapped) or not held
    assert mapped[:] == file.read_bytes() == before


def test_a_file_that_is_gone_or_small_is_no_error(tmp_path: Path) -> None:
    assert not bring_back_in_huge_pages(tmp_path / "none")
    small = tmp_path / "small"
    small.write_bytes(b"x" * 4096)
    assert bring_back_in_huge_pages(small)
