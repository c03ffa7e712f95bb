"""A search on disk: what is searched, and every visit, one line of `visits.jsonl` that is written
whole when it has ended. A search that was killed goes on after its last whole visit.
"""

import json
from pathlib import Path
from typing import Any, final

from foretoken.errors import ConfigError
from foretoken.lab.measure.segments import CONFIG, TAKEN, require_same_settings
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.run_files import LineWriter, read_lines, write_json
from foretoken.lab.tune.visits import Visit

VISITS = "visits.jsonl"
ANSWER = "answer.json"


@final
class Journal:
    """The visits of a search, on disk as they end."""

    def __init__(self, folder: Path, settings: Any, *, resume: bool) -> None:
        """Begin, or with `resume` go on with what is there.

        Raises:
            ConfigError: there is a search already and `resume` is not set, or its settings
                were others.
        """
        self.folder = folder
        path = folder / VISITS
        self.visits = [
            from_plain(Visit, value, f"{path}:{number}") for number, value in read_lines(path)
        ]
        if self.visits and not resume:
            raise ConfigError("--out", str(folder), TAKEN)
        if self.visits:
            before = json.loads((folder / CONFIG).read_text("utf-8"))
            # More time is a reason to go on; everything else would change what was measured.
            require_same_settings(before, to_plain(settings), but=("budget_s",))
        write_json(folder / CONFIG, settings)
        try:
            self._file = LineWriter(path)
        except OSError as error:
            raise ConfigError("--out", str(folder), f"a folder to write to ({error})") from error

    def add(self, visit: Visit) -> None:
        """Keep a visit that has ended.

        Raises:
            ConfigError: the disk is full.
        """
        try:
            self._file.write(visit)
        except OSError as error:
            allowed = f"a disk with room ({error}); --resume goes on from here"
            raise ConfigError("--out", str(self.folder), allowed) from error
        self.visits.append(visit)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
