"""How `--help` looks: options by group, and nothing cut, however narrow the terminal.

Typer's tables of rich cut names where the columns do not fit, so its plain formatter is used; that
one cuts no names, but the lines about commands. Knows no command.
"""

import re
from typing import Any

from typer.core import TyperCommand, TyperGroup

_IN_WORDS = re.compile(r"\[default: \((.*)\)\]$")
"""Typer puts a default that is a text into parentheses."""


def write_panels(command: TyperCommand, ctx: Any, formatter: Any) -> None:
    """The arguments of a command, then its options under the headings of their
    `rich_help_panel`, in order of the first of each."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        row = parameter.get_help_record(ctx)
        if row is None:
            continue
        kind = "Arguments" if parameter.param_type_name == "argument" else "Other"
        heading = getattr(parameter, "rich_help_panel", None) or kind
        names, text = row
        groups.setdefault(heading, []).append((names, _IN_WORDS.sub(r"[default: \1]", text)))
    for heading, rows in groups.items():
        with formatter.section(heading):
            formatter.write_dl(rows)


def write_commands(group: TyperGroup, formatter: Any) -> None:
    """The commands of a group, each with the first paragraph of its help."""
    rows = [
        (name, " ".join((command.help or "").split("\n\n")[0].split()))
        for name, command in group.commands.items()
        if not command.hidden
    ]
    with formatter.section("Commands"):
        formatter.write_dl(rows)
