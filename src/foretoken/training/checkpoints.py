"""A run's checkpoints: written whole or not at all, the last two kept.

Owns the run folder's `step-*.pt` files. Invariant: a file with that name is complete, because it
is renamed into place after it is on disk.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from foretoken.errors import ConfigError, TrainingError

KEPT = 2


def _all(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*.pt"))


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` as the checkpoint of `step` and drop all but the newest two.

    Raises:
        TrainingError: it cannot be written, as on a full disk.
    """
    path = folder / f"step-{step:07d}.pt"
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        part.unlink(missing_ok=True)
        raise TrainingError(f"{path}: {error}; the checkpoints before it are intact") from error
    for old in _all(folder)[:-KEPT]:
        old.unlink()
    return path


def newest(folder: Path) -> Iterator[Path]:
    """The checkpoints of `folder`, newest first."""
    yield from reversed(_all(folder))


def load_newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint's state on the CPU, or None for a fresh run.

    Raises:
        ConfigError: the file is broken, as a copy may be.
    """
    for path in newest(folder):
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, OSError, UnpicklingError) as error:
            allowed = "a whole checkpoint; delete it to go on from the one before"
            raise ConfigError(str(path), str(error), allowed) from error
        return state
    return None


def newest_state(run: Path) -> dict[str, Any]:
    """The newest checkpoint of a run's folder. Raises ConfigError where there is none."""
    state = load_newest(run)
    if state is None:
        raise ConfigError("run folder", str(run), "a folder that holds step-*.pt checkpoints")
    return state
