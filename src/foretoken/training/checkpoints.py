"""A run's checkpoints: written whole or not at all, the last two kept.

Owns the run folder's `step-*.pt` files. Invariant: a file with that name is complete, because it
is renamed into place after it is on disk.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from foretoken.errors import ConfigError

KEPT = 2


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` as the checkpoint of `step` and drop all but the newest two."""
    path = folder / f"step-{step:07d}.pt"
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def newest(folder: Path) -> Iterator[Path]:
    """The checkpoints of `folder`, newest first."""
    yield from reversed(_all(folder))


def load_newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint's state on the CPU, or None for a fresh run."""
    for path in newest(folder):
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state
    return None


def newest_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run's folder. Raises ConfigError where there is none."""
    state = load_newest(run)
    if state is None:
        raise ConfigError("run folder", str(run), "a folder that holds step-*.pt checkpoints")
    return state
