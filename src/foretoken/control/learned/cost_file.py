"""Costs kept on disk between two processes: one small JSON file for each kind of engine.

Those timed at a start are written then; those learnt while serving from time to time and at the
end, never by the step that learnt them. A process that is killed loses the last minute.

A file belongs to one model, precision, set of drafters, device, number of threads and kernels. Any
of these changed, there is another file. Nothing here is worth an error: a folder that cannot be
read or written is a folder without files.
"""

import hashlib
import json
import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from foretoken.control.cost import StepShape
from foretoken.hardware import user_caches

logger = logging.getLogger("foretoken")

_FORMAT = 4
_LEFT_S = 60.0
"""Age from which on a file that was not renamed belongs to a process that was killed."""
_EVERY_S = 60.0
"""Seconds of steps after which costs are written again."""
_LEAST_S = 1.0
"""Seconds of steps that are worth writing at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostKey:
    """What costs depend on, beside the shape of a step."""

    model: str
    """Sizes of the target."""
    precision: str
    """Types of weights and of keys and values."""
    drafters: str
    """Who drafts, with what."""
    device: str
    threads: int
    kernels: str
    """Which build of which instruction set."""
    page_size: int

    @property
    def digest(self) -> str:
        """A name for a file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCosts:
    """What a file holds."""

    target: Mapping[str, Any]
    """`TargetStepTimeModel.to_dict`."""
    drafters: Mapping[str, Mapping[str, Any]]
    """`DrafterCost.to_dict` by name."""
    timed: tuple[tuple[StepShape, float], ...]
    """Steps as they were timed at a start, which a later start can time again."""


@final
class CostFile:
    """The file of one key."""

    def __init__(self, key: CostKey, folder: Path | None = None) -> None:
        """Below `folder`; None: that of the user's caches."""
        self.key = key
        self.path = (folder or cache_folder()) / f"{key.digest}.json"

    def read(self) -> SavedCosts | None:
        """What is known; None if there is no file, or it is not whole."""
        try:
            found = json.loads(self.path.read_text("utf-8"))
            if found["format"] != _FORMAT or found["key"] != asdict(self.key):
                return None
            return SavedCosts(
                target=dict(found["target"]),
                drafters=dict(found["drafters"]),
                timed=tuple(_timed(*row) for row in found["timed"]),
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, costs: SavedCosts) -> bool:
        """Replace the file in one move; whether that could be done."""
        document = {
            "format": _FORMAT,
            "key": asdict(self.key),
            "target": costs.target,
            "drafters": costs.drafters,
            "timed": [[*shape, seconds] for shape, seconds in costs.timed],
        }
        temporary = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", dir=self.path.parent, prefix=self.key.digest, suffix=".tmp", delete=False,
                encoding="utf-8",
            ) as file:  # fmt: skip
                temporary = Path(file.name)
                json.dump(document, file)
            temporary.replace(self.path)
            self._tidy()
        except OSError as error:
            logger.debug("costs are not kept: %s", error)
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink(missing_ok=True)
            return False
        return True

    def _tidy(self) -> None:
        """Remove what processes left that were killed while they wrote."""
        before = time.time() - _LEFT_S
        for left in self.path.parent.glob(f"{self.key.digest}*.tmp"):
            with suppress(OSError):
                if left.stat().st_mtime < before:
                    left.unlink()

    def drop(self) -> None:
        """Forget it: the machine is another one now."""
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


@final
class CostKeeper:
    """Writes what one engine has learnt to its file."""

    def __init__(self, file: CostFile, known: Callable[[], SavedCosts]) -> None:
        """`known` gives what is known by now; asked between two steps."""
        self._file, self._known = file, known
        self._since_s = 0.0

    def passed(self, seconds: float) -> None:
        """A step took so long."""
        self._since_s += seconds
        if self._since_s >= _EVERY_S:
            self._since_s = 0.0
            known = self._known()
            # A folder may lie on a slow network; no request waits for it.
            with suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._file.write, args=(known,), name="costs").start()

    def close(self) -> None:
        """Write what was learnt since; the engine is gone or about to be."""
        if self._since_s >= _LEAST_S:
            self._since_s = 0.0
            self._file.write(self._known())


def cache_folder() -> Path:
    """Where costs are kept, below the user's caches."""
    return user_caches() / "costs"


def _timed(
    rows: int, sequences: int, context: float, prompt_rows: int, experts: float, seconds: float
) -> tuple[StepShape, float]:
    if not 0.0 < seconds < math.inf:
        raise ValueError(f"seconds of a step: {seconds}")
    shape = StepShape(int(rows), int(sequences), float(context), int(prompt_rows), float(experts))
    return shape, float(seconds)
