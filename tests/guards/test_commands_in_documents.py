"""Every `foretoken` command line that a document shows is one that the parser takes."""

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from foretoken.cli.app import app
from foretoken.errors import ConfigError
from tests.guards.sources import ROOT

SHELL_BLOCK = re.compile(r"```(?:sh|console|bash)\n(.*?)```", re.DOTALL)


def shown_commands() -> Iterator[tuple[str, list[str]]]:
    """Document and words of each command line, continuation lines joined, comments dropped."""
    for path in [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in SHELL_BLOCK.findall(path.read_text("utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                shown = line.removeprefix("$ ").rstrip("& ")
                if shown.split(" ")[0].rsplit("/")[-1] == "foretoken":
                    words = shlex.split(shown, comments=True)[1:]
                    yield path.name, [word for word in words if word != "..."]


def subcommand(words: list[str]) -> tuple[TyperCommand | TyperGroup, list[str]]:
    """The command that the leading words name, and the words left."""
    command: Any = typer.main.get_command(app)
    while isinstance(command, TyperGroup) and words and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize(("document", "words"), list(shown_commands()))
def test_a_shown_command_parses(document: str, words: list[str]) -> None:
    command, rest = subcommand(words)
    if isinstance(command, TyperGroup):
        wanted = rest[0].split("|") if rest else []
        assert [word for word in wanted if word not in command.commands] == [], document
        return
    try:
        context = command.make_context("foretoken", list(rest))
    except typer.BadParameter as error:
        assert "does not exist" in error.message, f"{document}: {error.message}"
    else:
        assert context.args == [], f"{document}: {context.args}"


@pytest.mark.parametrize("name", ["serve", "compare"])
def test_an_unknown_option_would_be_found(name: str) -> None:
    usage_error = typer.BadParameter.__base__
    assert usage_error is not None
    with pytest.raises((AssertionError, usage_error, ConfigError)):
        test_a_shown_command_parses("a document", [name, "demo", "--no-such-option"])
