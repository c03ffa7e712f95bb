"""What a run of `foretoken train auto` has done so far, and how much of its time is used up.

Owns `journal.jsonl`: one line a finished part of the work, written once it is on disk, with the
second of the run at which it ended. A part that has a line is not done again. The time of a run is
that of the clock while a process of it lives, pauses included; what lies between the last line
before a kill and the next start does not count.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

from foretoken.errors import ConfigError
from foretoken.training.run_folder import append_lines, make, read_lines

FILE = "journal.jsonl"
BEAT = "beat"
BEAT_S = 20.0
"""Between lines that only say how late it is; a killed run forgets at most so much time."""

Facts = dict[str, Any]


@final
class RunJournal:
    """The journal of one run's folder; `seconds` is how much of its time is used up."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        """Open the journal in `folder`, or begin one; `now` is a clock in seconds.

        Raises:
            ConfigError: a line is broken.
        """
        make(folder)
        self._path, self._now = folder / FILE, now
        self._lines = _read(self._path)
        self._before = float(self._lines[-1]["at"]) if self._lines else 0.0
        self._began = now()
        self._last = self._before

    @property
    def seconds(self) -> float:
        """Time of the run that is used up."""
        return self._before + self._now() - self._began

    def find(self, part: str) -> Any | None:
        """What a finished part came to; None: it is not finished."""
        return next((line["found"] for line in self._lines if line["part"] == part), None)

    def once(self, part: str, work: Callable[[], Facts]) -> Facts:
        """What `part` came to: as it is written down, or by doing the `work` now."""
        known: Facts | None = self.find(part)
        if known is not None:
            return known
        found: Facts = json.loads(json.dumps(work()))
        self._write(part, found)
        return found

    def beat(self) -> None:
        """Write down how late it is, if nothing has been written for a while."""
        if self.seconds - self._last >= BEAT_S:
            self._write(BEAT, {})

    def _write(self, part: str, found: Facts) -> None:
        line: Facts = {"part": part, "at": round(self.seconds, 3), "found": found}
        append_lines(self._path, [json.dumps(line)], "start again to go on")
        self._lines.append(line)
        self._last = line["at"]


def _read(path: Path) -> list[Facts]:
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            record = json.loads(line)
            found.append({name: record[name] for name in ("part", "at", "found")})
        except (ValueError, KeyError, TypeError) as error:
            allowed = "a line that a run wrote; name another --out for a new run"
            raise ConfigError(f"{path} line {number}", line[:120], allowed) from error
    return found
