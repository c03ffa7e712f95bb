"""Packed weights that a test keeps: where, of which models, and on what disk."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.models import weight_cache

begin_behind = weight_cache._begin_behind
EMPTY_DISK = SimpleNamespace(total=1 << 40, free=1 << 40)


def keep_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep those of the smallest models too, below `folder`, however full the machine's disk is.
    A load waits for its file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: EMPTY_DISK)

    def waited_for(work: Callable[[], None], *, daemon: bool = False) -> threading.Thread:
        thread = begin_behind(work, daemon=daemon)
        if not daemon:
            thread.join()
        return thread

    monkeypatch.setattr(weight_cache, "_begin_behind", waited_for)
    return weight_cache.packed_folder()


def settle() -> None:
    """Wait for what nobody else waits for."""
    while there := [one for one in threading.enumerate() if one.name == "packed-weights"]:
        there[0].join(60)
