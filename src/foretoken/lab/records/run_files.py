"""Files of a run's folder: requests.jsonl while it goes, summary.json at its end.

A folder has `requests.jsonl` (one RequestRecord per line, in order of ending) and `summary.json`
(an AbSummary). Lines are written whole and flushed, so that a run that dies leaves a file that can
be read and resumed. Also what a measured number must be read with (`describe_client`): versions,
machine, time, command line. Keys, tokens and passwords are taken out of what is written down.
"""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any, Self

import foretoken
from foretoken.errors import ConfigError
from foretoken.hardware import Hardware
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import SCHEMA, AbSummary, RequestRecord

REQUESTS = "requests.jsonl"
SUMMARY = "summary.json"
ANSWER = "answer.json"
"""Of a search by `tune`."""
GRID = "grid.json"
_SECRETS = re.compile(
    r"\b(?:sk-[\w-]{16,}|hf_\w{20,}|gh[pousr]_\w{20,}|AKIA[0-9A-Z]{16}|xox[abp]-[\w-]{10,})"
    r"|(?i:\bbearer\s+[\w.~+/-]{16,}=*)"
    r"|(?i:\b(?:password|passwd|api[_-]?key|secret|token)\b\s*[:=]\s*)\S{6,}"
)
_REDACTED = "[redacted]"


class LineWriter(AbstractContextManager["LineWriter"]):
    """Appends JSON lines; each is on its way to the disk before the next is begun."""

    def __init__(self, path: Path) -> None:
        """Append to `path`, cutting off a last line that was not written whole."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            with path.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        # Without a buffer of ours, a line that did not fit is not tried again at the next.
        self._file: IO[bytes] = path.open("ab", buffering=0)

    @classmethod
    def within(cls, folder: Path, name: str) -> Self:
        """A file of the folder of `--out`. Raises ConfigError where there can be none."""
        try:
            return cls(folder / name)
        except OSError as error:
            raise ConfigError("--out", str(folder), f"a folder to write to ({error})") from error

    def write(self, value: Any) -> None:
        """Append one dataclass or JSON value. Raises OSError where the disk is full or the file is
        gone; lines before this one are safe."""
        line = json.dumps(to_plain(value), separators=(",", ":")).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            raise OSError(28, "no room for a whole line", str(self.path))

    def close(self) -> None:
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def read_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Number and value of every JSON line; none without a file, nor for a last line cut short.
    Raises ConfigError if a line is not JSON."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith("\n"):
                return  # the run was killed while writing it
            try:
                yield number, json.loads(line)
            except ValueError as error:
                allowed = "JSON, as a run wrote it; delete the line, or measure again"
                raise ConfigError(f"{path} line {number}", line, allowed) from error


def read_requests(folder: Path) -> list[RequestRecord]:
    """Every request of a run's folder; an unfinished last line is left out. Raises ConfigError if
    there is no such file, or a line is not a RequestRecord."""
    path = folder / REQUESTS
    if not path.is_file():
        allowed = f"a folder with {REQUESTS}, as `foretoken lab ab --out FOLDER` writes it"
        raise ConfigError("RUN", str(folder), allowed)
    return [from_plain(RequestRecord, v, f"{path}:{n}") for n, v in read_lines(path)]


def make_folder(folder: Path) -> None:
    """Make the folder of `--out`. Raises ConfigError where there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("--out", str(folder), f"a folder to write to ({error})") from error


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Replace `path`, whole or not at all; errors name the `option`. Raises ConfigError where there
    is no writing to that place, or the disk is full."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{path.name}.partial"
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(option, str(path), f"a place to write to ({error})") from error


def write_json(path: Path, value: Any) -> None:
    """The same with the JSON of `value`."""
    write_text(path, json.dumps(to_plain(value), indent=2) + "\n")


def read_summary(folder: Path) -> AbSummary:
    """The summary of a run's folder. Raises ConfigError if there is none, or it is of another kind
    or schema."""
    path = folder / SUMMARY if folder.is_dir() else folder
    if not path.is_file():
        allowed = f"a folder with {SUMMARY}, as `foretoken lab ab --out FOLDER` writes it"
        if (folder / ANSWER).is_file():
            allowed += "; this is of `foretoken lab tune`: --resume says its verdict again"
        elif (folder / REQUESTS).is_file():
            allowed = (
                f"a finished run; this has no {SUMMARY} yet: measure it to its end with --resume"
            )
        raise ConfigError("RUNS", str(folder), allowed)
    again = "`foretoken lab ab` with the settings of that run, --out and --resume writes it anew"
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("RUNS", str(path), f"a whole summary ({error}); {again}") from error
    if not isinstance(value, dict) or value.get("kind") not in ("ab", "run"):
        raise ConfigError("RUNS", str(path), "a summary that `foretoken lab ab` wrote")
    if value.get("schema") != SCHEMA:
        given = f"{path} of schema {value.get('schema')}"
        allowed = f"schema {SCHEMA}, of this version of Foretoken; measure again"
        raise ConfigError("RUNS", given, allowed)
    try:
        return from_plain(AbSummary, value, str(path))
    except ConfigError as error:
        allowed = f"{error.allowed} (is it of another version of Foretoken? Then measure again)"
        raise ConfigError(error.field, error.given, allowed) from error


def read_ab(folder: Path) -> AbSummary:
    """The summary of an A/B's folder. Raises ConfigError if there is none, or it is a run of one
    arm."""
    found = read_summary(folder)
    if not found.compared:
        allowed = "the folder of an A/B (`foretoken lab ab`); this is a run of one arm"
        raise ConfigError("RUNS", str(folder), allowed)
    return found


def ab_folders(folders: Sequence[Path]) -> list[Path]:
    """The folders of A/Bs: as given, and every finished cell of what `lab ab --grid` wrote. Raises
    ConfigError at a grid without cells, or one with forced acceptance."""
    found: list[Path] = []
    for folder in folders:
        is_grid = (folder / GRID).is_file() and not (folder / SUMMARY).is_file()
        found += _cells(folder) if is_grid else [folder]
    return found


def _cells(folder: Path) -> list[Path]:
    path = folder / GRID
    try:
        value = json.loads(path.read_text("utf-8"))
        cells, forced = [folder / str(cell["folder"]) for cell in value["cells"]], value["forced"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = "what `foretoken lab ab --grid` wrote; with --resume it writes it anew"
        raise ConfigError("RUNS", str(path), allowed) from error
    if forced or not cells:
        allowed = "a grid with a finished cell; `foretoken lab ab --resume` goes on with it"
        if forced:
            allowed = "a run without --force-acceptance: its gains are not those of a draft"
        raise ConfigError("RUNS", str(folder), allowed)
    return cells


def finished_ab(folder: Path) -> AbSummary | None:
    """The summary of an A/B that was measured whole; None if it was not, or not yet."""
    if not (folder / SUMMARY).is_file():
        return None
    found = read_summary(folder)
    return found if found.compared and found.complete else None


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


def redact_secrets(text: str) -> str:
    """A text of any length without what looks like a key or a password."""
    return _SECRETS.sub(_REDACTED, text)


def redact_word(word: str) -> str:
    """A word of a command line; where an option or a prefix says secret, however short it is."""
    lowered = word.lower()
    if lowered.startswith(("sk-", "hf_", "bearer ")):
        return _REDACTED
    for name in ("api-key=", "api_key=", "token=", "password="):
        if name in lowered:
            return word[: lowered.index(name) + len(name)] + _REDACTED
    return redact_secrets(word)
