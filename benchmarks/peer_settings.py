"""The file of settings that searches came to.

It names hardware, models and versions: what was found on another machine is an error, what was
found with other versions is searched again. Knows nothing of how a search is made.
"""

import itertools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peer_cases import CASES, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting and how fast it was; 0 tokens/s if it did not work, which `note` explains."""

    setting: Setting
    tokens_per_s: float
    read_gb_per_s: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search came to."""

    best: Setting
    versions: dict[str, str]
    tokens: int
    """That every setting was asked for."""
    when: str
    tried: list[Trial]

    @property
    def speed(self) -> float:
        """The fastest trial's, as the search counts: tokens/s, or first tokens/s; 0 if none."""
        return max((trial.tokens_per_s for trial in self.tried), default=0.0)


class SettingsFile:
    """Searches that were made on one machine with one set of models."""

    def __init__(self, path: Path, machine: dict[str, Any], own: Path | None = None) -> None:
        """Read what is there; `machine` is processor, cores, flags and shape of the models.

        Args:
            path: the file.
            machine: what searches depend on.
            own: of fewer instructions than the machine has: where what is searched with these
                goes, so that it is not taken for the machine's own; default: `path`.

        Raises:
            SystemExit: it was found on another machine or with other models.
        """
        self._path, self._machine = own or path, machine
        self._below = _read(path, machine) if own else {}
        self._entries = _read(self._path, machine)

    def get(self, engine: str, name: str, versions: dict[str, str]) -> Found | None:
        """What was found for a case with the same versions."""
        known = (entries.get(f"{engine} | {name}") for entries in (self._entries, self._below))
        return next((found for found in known if found and found.versions == versions), None)

    def forget(self, engines: Iterable[str], names: Iterable[str]) -> None:
        """Leave out what was found, so that it is searched again."""
        for engine, name in itertools.product(engines, names):
            self._entries.pop(f"{engine} | {name}", None)
            self._below.pop(f"{engine} | {name}", None)

    def put(self, engine: str, name: str, found: Found) -> None:
        """Add or replace an entry and write the file."""
        self._entries[f"{engine} | {name}"] = found
        entries = {key: asdict(entry) for key, entry in self._entries.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"machine": self._machine, "entries": entries}, indent=1))

    def of_kind(self, engine: str, kind: str, versions: dict[str, str]) -> Setting:
        """The setting of the first case of a kind that was searched, or none."""
        for name, case in CASES.items():
            found = self.get(engine, name, versions) if case.kind == kind else None
            if found:
                return found.best
        return {}


def _read(path: Path, machine: dict[str, Any]) -> dict[str, Found]:
    if not path.is_file():
        return {}
    document = json.loads(path.read_text())
    if document["machine"] != machine:
        raise SystemExit(
            f"{path} was found on {document['machine']}, this is {machine}: "
            "name another file with --settings"
        )
    entries = {}
    for key, entry in document["entries"].items():
        tried = [Trial(**trial) for trial in entry.pop("tried")]
        entries[key] = Found(**entry, tried=tried)
    return entries
