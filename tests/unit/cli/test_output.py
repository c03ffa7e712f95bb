"""stdout that cannot be written. The guarded bugs: a traceback of Python's, an exit code that reads
as a verdict though its words were lost, a server that ends for its own first lines."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.style import Style

from foretoken.cli.output import NOT_WRITTEN, READER_GONE, checked_stdout, say
from foretoken.cli.writing import BLOCK, MEANINGS, STYLES, Painter, legend
from foretoken.types import Output, TokenSource

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


class LetterStream:
    """Writes token 65 as `A`; token 0 shows only with the token after it."""

    def __init__(self) -> None:
        self.text = ""
        self.held = ""

    def feed(self, ids: list[int]) -> None:
        for token in ids:
            if token == 0:
                self.held += "?"
            else:
                self.text += self.held + chr(token)
                self.held = ""


class LetterTokenizer:
    def stream(self, options: object) -> LetterStream:
        return LetterStream()


def output(ids: str, sources: str, text: str, drafter: str = "one") -> Output:
    """An output; sources by first letter, `.` for a token that shows no text yet."""
    by_letter = {source.value[0]: source for source in TokenSource}
    return Output(
        request_id="0",
        new_token_ids=tuple(0 if c == "." else ord(c) for c in ids),
        sources=tuple(by_letter[c] for c in sources),
        drafters=tuple(drafter if c == "a" else None for c in sources),
        text=text,
    )


def paint(*outputs: Output) -> list[list[tuple[str, str]]]:
    painter = Painter(LetterTokenizer())  # type: ignore[arg-type]
    return [[(piece, s[0]) for piece, s in painter.paint(one)] for one in outputs]


@pytest.mark.parametrize(
    ("outputs", "pieces"),
    [
        ([("abc", "aar", "abc")], [[("a", "a"), ("b", "a"), ("c", "r")]]),
        ([("ab", "ab", "a"), ("c", "t", "bc")], [[("a", "a")], [("b", "b"), ("c", "t")]]),
        ([(".", "a", ""), ("x", "r", "?x")], [[], [("?x", "r")]]),
    ],
    ids=["each token", "text held back", "a character with the token that completes it"],
)
def test_each_piece_has_the_source_of_its_token(outputs: list[Any], pieces: list[Any]) -> None:
    assert paint(*(output(*one) for one in outputs)) == pieces


@pytest.mark.parametrize("given", [("a", "a", "a!!"), ("abc", "aar", "ab")])
def test_text_is_all_that_is_shown(given: tuple[str, str, str]) -> None:
    """More than its tokens explain is not lost, a cut stop string is not there."""
    [pieces] = paint(output(*given))
    assert "".join(piece for piece, _ in pieces) == given[2]


def test_accepted_drafts_of_blocks_are_marked_apart() -> None:
    painter = Painter(LetterTokenizer(), frozenset({"wide"}))  # type: ignore[arg-type]
    wide = list(painter.paint(output("abc", "aab", "abc", "wide")))
    assert wide == [("a", BLOCK), ("b", BLOCK), ("c", TokenSource.BONUS)]
    [other] = painter.paint(output("d", "a", "d"))
    assert other == ("d", TokenSource.ACCEPTED)


def test_every_source_has_a_style_of_its_own_and_a_meaning() -> None:
    assert set(STYLES) == set(MEANINGS) == {*TokenSource, BLOCK}
    assert len({*STYLES.values()}) == len(STYLES)
    assert all(meaning in legend().plain for meaning in MEANINGS.values())


def test_blocks_are_told_apart_without_colour() -> None:
    underlined = {source for source, style in STYLES.items() if Style.parse(style).underline}
    assert underlined == {BLOCK}
