"""Packed weights that a test keeps: where, of which models, and on what disk."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from foretoken.models import packed_cache

EMPTY_DISK = SimpleNamespace(total=1 << 40, free=1 << 40)


def keep_packed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep those of the smallest models too, below `folder`, however full the machine's disk is."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "caches"))
    monkeypatch.setattr(packed_cache, "_LEAST_BYTES", 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: EMPTY_DISK)
    return packed_cache.packed_folder()
