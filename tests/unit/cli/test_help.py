"""Help fits 80 columns and cuts nothing: every option's whole name, every default of serving.

Guards against tables that shorten `--per-request-spec-decode-metrics` to `--per-reques...`.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.cli.serve_options import DEFAULTS, GROUPS, option


def paths(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from paths(child, (*path, name))


def find(path: tuple[str, ...]) -> Any:
    command: Any = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]
    return command


def helped(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("path", list(paths(typer.main.get_command(app))), ids=" ".join)
def test_names_are_whole_at_80_columns(path: tuple[str, ...]) -> None:
    text = helped(path)
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "…" not in text
    assert not re.search(r"[\w,]\.\.\.$", text, re.MULTILINE)
    words = text.replace(",", " ").split()
    for parameter in find(path).params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            for name in (*parameter.opts, *parameter.secondary_opts):
                assert name in words, name


def test_options_of_serving_are_grouped_and_say_their_defaults() -> None:
    text = helped(("serve",))
    assert [line[:-1] for line in text.splitlines() if line.rstrip(":") in GROUPS] == list(GROUPS)
    flat = " ".join(text.split())
    for said in ("8000", "127.0.0.1", "64", "2048", "600", "30", "on", "hermes", "0.9"):
        assert f"[default: {said}]" in flat, said
    assert "(none)" not in flat


def test_every_row_of_the_table_is_an_option_of_serving() -> None:
    names = {parameter.name for parameter in find(("serve",)).params}
    rows = {name for group in GROUPS.values() for name in group}
    assert rows == names - {"model", "help"}
    assert option("max_queue").show_default == str(DEFAULTS["max_queue"])
