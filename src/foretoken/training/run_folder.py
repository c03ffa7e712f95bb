"""A run's folder: files written whole or not at all, its checkpoints, and where the run comes from.

Owns the `step-*.pt` files, of which the last two are kept, and `provenance.json`, one record for
each start. It knows nothing of what is trained. Invariant: a file with its final name is complete,
because it is renamed into place after it is on disk; of files that grow, all lines but the last.
"""

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError

import foretoken
from foretoken.errors import ConfigError, TrainingError
from foretoken.training.settings import Settings

PROVENANCE = "provenance.json"
KEPT = 2


def folder_of(settings: Settings, out: Path | None) -> Path:
    """Where a run's files go: `out`, or the settings' own folder, or runs/NAME here."""
    return Path(os.path.expanduser(out or settings.out or Path("runs") / settings.name))


def make(folder: Path, option: str = "--out") -> None:
    """Make a folder that is to be written to. Raises ConfigError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(option, str(folder), f"a folder to write to ({error})") from error


def write_whole(path: Path, write: Callable[[Path], object], kind: str = "files") -> None:
    """Let `write` make a file, and rename it into place once it is on disk. Raises TrainingError:
    it cannot be written, as on a full disk; those of its `kind` before it are intact."""
    part = path.with_suffix(".part")
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.chmod(0o644)
        os.replace(part, path)
    except (OSError, RuntimeError, SafetensorError) as error:
        part.unlink(missing_ok=True)
        raise TrainingError(f"{path}: {error}; the {kind} before it are intact") from error


def read_lines(path: Path) -> list[bytes]:
    """All whole lines of a file, none if there is no file; a last one that a killed run left half
    written is removed."""
    if not path.exists():
        return []
    raw = path.read_bytes()
    whole = raw[: raw.rfind(b"\n") + 1]
    if len(whole) < len(raw):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return whole.splitlines()


def append_lines(path: Path, lines: Sequence[str], remedy: str) -> None:
    """Add lines, and wait until they are on disk. Raises TrainingError: they cannot be written; the
    message ends with the `remedy`."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TrainingError(f"{path}: {error}; {remedy}") from error


def save(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write `state` as the checkpoint of `step` and drop all but the newest two. Raises
    TrainingError: it cannot be written, as on a full disk."""

    def write(part: Path) -> None:
        with part.open("wb") as file:
            torch.save(state, file)

    path = folder / f"step-{step:07d}.pt"
    write_whole(path, write, "checkpoints")
    for old in newest(folder)[KEPT:]:
        old.unlink()
    return path


def newest(folder: Path) -> list[Path]:
    """The checkpoints of `folder`, newest first."""
    return sorted(folder.glob("step-*.pt"), reverse=True)


def load_newest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint's state on the CPU, or None for a fresh run. Raises ConfigError: the
    file is broken, as a copy may be."""
    path = next(iter(newest(folder)), None)
    if path is None:
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, UnpicklingError) as error:
        allowed = "a whole checkpoint; delete it to go on from the one before"
        wrong = " ".join(str(error).split()).split(". ")[0]
        raise ConfigError(str(path), wrong, allowed) from error
    return state


def newest_state(run: Path, *keys: str) -> dict[str, Any]:
    """The newest checkpoint of a run's folder. Raises ConfigError: there is none, or it lacks one
    of `keys`."""
    state = load_newest(run)
    if state is None or not set(keys) <= set(state):
        allowed = "a folder with step-*.pt checkpoints, as `foretoken train` writes it to --out"
        raise ConfigError("RUN", str(run), allowed)
    return state


def versions() -> dict[str, str]:
    """The versions of what decides the numbers."""
    return {
        "foretoken": foretoken.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
    }


def device_name() -> str:
    """What computes: the name of the GPU, or how many cores there are."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{os.cpu_count()} CPU cores"


def write_provenance(
    folder: Path, settings: dict[str, Any], data_digest: str | None, processes: int = 1
) -> None:
    """Add this start: time, command, versions, device, settings, data's digest, processes."""
    path = folder / PROVENANCE
    starts: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    starts.append(
        {
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv,
            "versions": versions(),
            "device": device_name(),
            "seed": settings["seed"],
            "processes": processes,
            "data": data_digest,
            "settings": settings,
        }
    )
    text = json.dumps(starts, indent=2) + "\n"
    write_whole(path, lambda part: part.write_text(text))
