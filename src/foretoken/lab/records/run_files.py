"""Files of a run's folder: requests.jsonl while it goes, summary.json at its end.

A folder has `requests.jsonl` (one RequestRecord per line, in order of ending), `scrapes.jsonl` (one
Scrape per line) and `summary.json` (a RunSummary or an AbSummary, with its `kind`). Lines are
written whole and flushed, so that a run that dies leaves a file that can be read and resumed. Also
what a measured number must be read with (`describe_client`): versions, machine, time, command line.
"""

import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import foretoken
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import SCHEMA, AbSummary, RequestRecord, RunSummary, Scrape
from foretoken.lab.records.secrets import redact_word

REQUESTS = "requests.jsonl"
SCRAPES = "scrapes.jsonl"
SUMMARY = "summary.json"


class LineWriter:
    """Appends JSON lines; each is on its way to the disk before the next is begun."""

    def __init__(self, path: Path) -> None:
        """Append to `path`, cutting off a last line that was not written whole."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            _drop_broken_end(path)
        # Without a buffer of ours, a line that did not fit is not tried again at the next.
        self._file: IO[bytes] = path.open("ab", buffering=0)

    def write(self, value: Any) -> None:
        """Append one dataclass or JSON value.

        Raises:
            OSError: the disk is full or the file is gone; lines before this one are safe.
        """
        line = json.dumps(to_plain(value), separators=(",", ":")).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(28, "no room for a whole line", str(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """The writer itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the file."""
        self.close()


def _drop_broken_end(path: Path) -> None:
    with path.open("rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole != len(data):
            file.truncate(whole)


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # the run was killed while writing it
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path.name} line {number}", line, "JSON") from error


def read_requests(folder: Path) -> list[RequestRecord]:
    """Every request of a run's folder; an unfinished last line is left out.

    Raises:
        ConfigError: there is no such file, or a line is not a RequestRecord.
    """
    path = folder / REQUESTS
    if not path.is_file():
        raise ConfigError("folder", str(folder), f"a run's folder, with {REQUESTS}")
    return [from_plain(RequestRecord, v, f"{REQUESTS}:{n}") for n, v in _lines(path)]


def read_scrapes(folder: Path) -> list[Scrape]:
    """Every scrape of a run's folder; none if the server had no metrics."""
    path = folder / SCRAPES
    if not path.is_file():
        return []
    return [from_plain(Scrape, v, f"{SCRAPES}:{n}") for n, v in _lines(path)]


def write_json(path: Path, value: Any) -> None:
    """Replace `path` by the JSON of `value`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".partial")
    temporary.write_text(json.dumps(to_plain(value), indent=2) + "\n", "utf-8")
    os.replace(temporary, path)


def read_summary(folder: Path) -> RunSummary | AbSummary:
    """The summary of a run's folder.

    Raises:
        ConfigError: there is none, or it is of another kind or schema.
    """
    path = folder / SUMMARY if folder.is_dir() else folder
    if not path.is_file():
        raise ConfigError("folder", str(folder), f"a folder with {SUMMARY}")
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ConfigError(str(path), "broken JSON", f"what a run wrote ({error})") from error
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        given = value.get("schema") if isinstance(value, dict) else None
        raise ConfigError(f"{path.name}: schema", given, f"{SCHEMA}")
    if value.get("kind") == "ab":
        return from_plain(AbSummary, value, path.name)
    return from_plain(RunSummary, value, path.name)


def read_ab(folder: Path, field: str = "RUNS") -> AbSummary:
    """The summary of an A/B's folder; errors call it `field`.

    Raises:
        ConfigError: there is none, or it is a run of one arm.
    """
    found = read_summary(folder)
    if not isinstance(found, AbSummary):
        allowed = "the folder of an A/B (`foretoken lab ab`); this is a run of one arm"
        raise ConfigError(field, str(folder), allowed)
    return found


def finished_ab(folder: Path) -> AbSummary | None:
    """The summary of an A/B that was measured whole; None if it was not, or not yet."""
    if not (folder / SUMMARY).is_file():
        return None
    found = read_summary(folder)
    return found if isinstance(found, AbSummary) and found.complete else None


def describe_client() -> dict[str, Any]:
    """The measuring side as plain data; servers describe themselves in ServerInfo."""
    hardware = Hardware.detect()
    return {
        "foretoken": foretoken.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "client_cpu": hardware.cpu_name,
        "client_cores": hardware.num_cores,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command_line": [redact_word(word) for word in sys.argv],
    }
