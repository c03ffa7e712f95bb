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

INLINE = re.compile(r"`(foretoken lab \w+ [^`]+)`")
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


def commands_of_the_claims() -> list[list[str]]:
    """Words of the commands that deciding.md names in its tables and sentences, each once."""
    text = SHELL_BLOCK.sub("", (ROOT / "docs" / "deciding.md").read_text("utf-8"))
    return [shlex.split(line)[1:] for line in dict.fromkeys(INLINE.findall(text))]


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


def test_a_rule_is_answered_by_a_command_that_parses() -> None:
    """What the reader is told to ask his server."""
    named = commands_of_the_claims()
    assert len(named) >= 30
    for words in named:
        test_a_shown_command_parses("deciding.md", words)


def test_every_claim_has_an_answer_a_reason_and_a_way_to_ask() -> None:
    page = (ROOT / "docs" / "deciding.md").read_text("utf-8")
    text = page.split("## What people say")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (?!it is said|---)(.+) \|$", text, re.MULTILINE)
    assert len(rows) >= 50
    for row in rows:
        said, holds, why, ask = row.split(" | ")
        assert holds.split(",")[0] in {"right", "depends", "corrected", "wrong"}, said
        assert why and ("`foretoken lab " in ask or ask.startswith("the same")), said


@pytest.mark.parametrize("name", ["serve", "compare"])
def test_an_unknown_option_would_be_found(name: str) -> None:
    usage_error = typer.BadParameter.__base__
    assert usage_error is not None
    with pytest.raises((AssertionError, usage_error, ConfigError)):
        test_a_shown_command_parses("a document", [name, "demo", "--no-such-option"])
