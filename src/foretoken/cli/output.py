"""stdout that can fail: a full disk is said in one line, a reader that has gone ends a command.

Exit codes of many commands are verdicts; one whose words were lost has a code of its own.
"""

import errno
import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

logger = logging.getLogger("foretoken")

NOT_WRITTEN = 74
"""EX_IOERR of sysexits.h: stdout could not be written."""
READER_GONE = 141
"""As shells show a program that SIGPIPE ended, such as one before `| head -1`."""


class OutputError(Exception):
    """What was printed cannot be written. Raised once; whatever is printed then is dropped."""

    def __init__(self, out: "_Out", cause: OSError) -> None:
        super().__init__(cause.strerror)
        self.out = out


@final
class _Out(io.FileIO):
    """The file below sys.stdout."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.failure: OSError | None = None
        self.needed = True
        """Whether a command has failed whose output is lost."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """Write, or raise an OutputError the first time that it fails."""
        if self.failure is not None:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise OutputError(self, error) from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within, a command runs, which ends with SystemExit; if something that it printed was lost,
    that becomes READER_GONE, or NOT_WRITTEN with a line on stderr."""
    given = sys.stdout
    if not isinstance(given, io.TextIOWrapper) or given is not sys.__stdout__:
        # It is closed, or a caller's own.
        yield
        return
    out = _Out(given.fileno())
    sys.stdout = text = io.TextIOWrapper(
        io.BufferedWriter(out),
        encoding=given.encoding,
        errors=given.errors,
        line_buffering=given.line_buffering,
        write_through=given.write_through,
    )
    try:
        yield
    except (SystemExit, OutputError):
        with suppress(OutputError):
            text.flush()
        if out.failure is not None and out.needed:
            raise SystemExit(_told(out.failure)) from None
        raise


def _told(failure: OSError) -> int:
    """The exit code, after a word where there is somebody to read it."""
    if failure.errno == errno.EPIPE:
        return READER_GONE
    print(f"foretoken: stdout: cannot be written: {failure.strerror}", file=sys.stderr)
    return NOT_WRITTEN


def say(line: str) -> None:
    """Print at once; a server that nobody can read any more goes on, and says so on its log."""
    try:
        print(line, flush=True)
    except OutputError as error:
        error.out.needed = False
        logger.warning("stdout: cannot be written: %s; the server goes on without", error)
