"""CPython's standard library as a text to learn from: the sources installed beside the interpreter.

Owns which files are read and which are held out; the packaged models were trained on the rest. It
knows nothing of tokenizers or torch. Invariant: no held-out module, and no file that shares a tenth
of a held-out module's distinctive lines, is ever among the training files.
"""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from foretoken.errors import ConfigError

HELD_OUT = (
    "asyncio/locks.py", "asyncio/queues.py", "base64.py", "bisect.py",
    "calendar.py", "cmd.py", "code.py", "colorsys.py", "concurrent/futures/thread.py",
    "configparser.py", "contextlib.py", "copy.py", "csv.py", "email/utils.py", "filecmp.py",
    "fileinput.py", "fractions.py", "functools.py", "getopt.py", "glob.py", "graphlib.py",
    "gzip.py", "heapq.py", "html/parser.py", "http/cookies.py", "json/decoder.py",
    "json/encoder.py", "linecache.py", "multiprocessing/pool.py", "netrc.py", "pprint.py",
    "queue.py", "reprlib.py", "sched.py", "shelve.py", "shlex.py", "string.py", "tempfile.py",
    "textwrap.py", "timeit.py", "urllib/robotparser.py", "uuid.py", "wave.py", "weakref.py",
    "zipapp.py",
)  # fmt: skip

SKIPPED_FOLDERS = frozenset(
    "site-packages __pycache__ lib-dynload encodings pydoc_data data encoded_modules "
    "cjkencodings _bundled unicode_tables".split()
)
SKIPPED_FILES = frozenset(
    "html/entities.py stringprep.py this.py tkinter/tix.py turtledemo/__main__.py".split()
)
TEST_FOLDERS = frozenset("test tests idle_test".split())
MOST_DIGITS = 0.12
MOST_NON_ASCII = 0.02
MOST_SHARED_LINES = 0.10
SHORTEST_DISTINCTIVE_LINE = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file: its path below the standard library, its text, and whether it is a test."""

    path: str
    text: str
    is_test: bool

    @property
    def digest(self) -> str:
        """SHA-256 of the text's UTF-8 bytes, the first 12 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The files to train on, and those held out for measurement."""

    training: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A text to continue; `reference` is what the source really goes on with."""

    name: str
    text: str
    reference: str


SOURCES = "a Python with the sources of its standard library; or give a file of prompts instead"
"""What errors say where the sources are not there."""


def stdlib_path() -> Path:
    """Where this interpreter keeps the standard library's sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def distinctive_lines(text: str) -> frozenset[str]:
    """The stripped lines long enough to tell one file from another."""
    lines = (line.strip() for line in text.splitlines())
    return frozenset(line for line in lines if len(line) >= SHORTEST_DISTINCTIVE_LINE)


def is_table(text: str) -> bool:
    """Whether a text is mostly digits or characters of other scripts, which teach no Python."""
    digits = sum(text.count(digit) for digit in "0123456789")
    foreign = sum(not char.isascii() for char in text)
    return digits > MOST_DIGITS * len(text) or foreign > MOST_NON_ASCII * len(text)


def _read(root: Path) -> Iterator[SourceFile]:
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.as_posix() in SKIPPED_FILES:
            continue
        if relative.parts[0].startswith("config-") or relative.name.startswith("_sysconfigdata"):
            continue
        try:
            text = path.read_text("utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip() and not is_table(text):
            is_test = bool(TEST_FOLDERS.intersection(relative.parts[:-1]))
            yield SourceFile(path=relative.as_posix(), text=text, is_test=is_test)


def _without_copies(
    files: Iterable[SourceFile], held_out: tuple[SourceFile, ...]
) -> Iterator[SourceFile]:
    guarded = [distinctive_lines(file.text) for file in held_out]
    own_tests = {f"test_{Path(file.path).stem}.py" for file in held_out}
    seen: set[str] = set()
    for file in files:
        lines = distinctive_lines(file.text)
        copied = any(len(lines & held) > MOST_SHARED_LINES * len(held) for held in guarded if held)
        if copied or file.digest in seen or Path(file.path).name in own_tests:
            continue
        seen.add(file.digest)
        yield file


@cache
def held_out_files(root: Path | None = None) -> tuple[SourceFile, ...]:
    """The held-out modules alone, which is quick. Raises ConfigError when none is there."""
    root = root or stdlib_path()
    found = tuple(
        SourceFile(path=path, text=(root / path).read_text("utf-8"), is_test=False)
        for path in sorted(HELD_OUT)
        if (root / path).is_file()
    )
    if not found:
        raise ConfigError("corpus", str(root), SOURCES)
    return found


@cache
def load_corpus(root: Path | None = None) -> Corpus:
    """Read and split the standard library (at `root`, by default this interpreter's own).

    Raises ConfigError when no source is found there.
    """
    root = root or stdlib_path()
    held_out = held_out_files(root)
    rest = (file for file in _read(root) if file.path not in HELD_OUT)
    training = tuple(_without_copies(rest, held_out))
    if not training:
        raise ConfigError("corpus", str(root), SOURCES)
    return Corpus(training=training, held_out=held_out)
