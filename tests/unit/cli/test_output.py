"""stdout that cannot be written. The guarded bugs: a traceback of Python's, an exit code that reads
as a verdict though its words were lost, a server that ends for its own first lines."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest

from foretoken.cli.output import NOT_WRITTEN, READER_GONE, checked_stdout, say

Command = Callable[[], None]


def quiet() -> None:
    print("x")


def long() -> None:
    while True:
        print("x" * 1000)


def careless() -> None:
    for _ in range(3):
        with suppress(Exception):
            print("x", flush=True)


def ended(command: Command, code: int = 0) -> object:
    """The exit code of a command that would exit with `code`."""
    with pytest.raises(SystemExit) as end, checked_stdout():
        command()
        raise SystemExit(code)
    return end.value.code


@contextmanager
def stdout_at(descriptor: int) -> Iterator[None]:
    with open(descriptor, "w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        patch.setattr(sys, "__stdout__", file)
        yield
        patch.undo()


def full() -> AbstractContextManager[None]:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    return stdout_at(os.open("/dev/full", os.O_WRONLY))


def unread() -> AbstractContextManager[None]:
    reading, writing = os.pipe()
    os.close(reading)
    return stdout_at(writing)


@pytest.mark.parametrize("command", [quiet, long, careless])
def test_a_full_disk_is_said_in_a_line(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with full():
        assert ended(command, 1) == NOT_WRITTEN
    [line] = capsys.readouterr().err.splitlines()
    assert line == "foretoken: stdout: cannot be written: No space left on device"


@pytest.mark.parametrize("command", [quiet, long, careless])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with unread():
        assert ended(command) == READER_GONE
    assert capsys.readouterr().err == ""


def test_a_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def serving() -> None:
        for line in ("one", "two", "three"):
            say(line)

    with full(), caplog.at_level("WARNING", "foretoken"):
        assert ended(serving) == 0
    assert caplog.text.count("stdout: cannot be written: No space left on device") == 1


def test_what_can_be_written_is_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with stdout_at(os.open(path, os.O_WRONLY | os.O_CREAT)):

        def speaking() -> None:
            say("first")
            sys.stdout.write("\u00e9 and more\n")
            sys.stdout.buffer.flush()

        assert ended(speaking, 6) == 6
    assert path.read_text() == "first\n\u00e9 and more\n"


def test_a_bug_keeps_its_traceback() -> None:
    with full(), pytest.raises(ZeroDivisionError), checked_stdout():
        print("x")
        print(1 / 0)


@pytest.mark.parametrize("given", [None, "captured"])
def test_another_stdout_is_left_alone(
    given: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if given is None:
        monkeypatch.setattr(sys, "stdout", None)
    assert ended(quiet) == 0
    assert capsys.readouterr().out == ("" if given is None else "x\n")
