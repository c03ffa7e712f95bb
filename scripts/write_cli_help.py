"""Write docs/cli.md from the command tree: what a change of the command line shows up in.

Reads the tree instead of printed help, so that the result does not depend on the width of a
terminal or on typer's version.
"""

from pathlib import Path
from typing import Any

import typer.main

from foretoken.cli.app import app

TARGET = Path(__file__).parents[1] / "docs" / "cli.md"

HEADER = """\
# Command line

Written by `make docs` from the commands themselves; do not edit.

Exit codes stand with each command. Beside them, a command exits with 74 if its output could not be
written, as to a full disk, with a line on stderr, and with 141 if nobody read it to the end, as
before `| head -1`. A server goes on without its output.
"""


def describe_parameter(parameter: Any) -> str:
    """One table row."""
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    if parameter.param_type_name == "argument":
        names = f"`{parameter.name.upper()}`"
    default = "required" if parameter.required else ""
    if not (parameter.required or parameter.default is None or parameter.default is False):
        default = f"`{parameter.default}`"
    in_words = getattr(parameter, "show_default", None)
    if isinstance(in_words, str):
        default = in_words
    help_text = (getattr(parameter, "help", None) or "").replace("|", "\\|")
    return f"| {names} | {default} | {help_text} |"


def describe_command(name: str, command: Any) -> list[str]:
    """A section per command, its subcommands after it."""
    prose = " ".join((command.help or "").split("\f")[0].split())
    lines = ["", f"## `{name}`", "", prose]
    if getattr(command, "epilog", None):
        lines += ["", " ".join(command.epilog.split())]
    parameters = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if parameters:
        lines += ["", "| argument | default | meaning |", "|---|---|---|"]
        lines += [describe_parameter(parameter) for parameter in parameters]
    for subname, subcommand in getattr(command, "commands", {}).items():
        if subcommand.hidden:
            continue
        lines += describe_command(f"{name} {subname}", subcommand)
    return lines


def render() -> str:
    """The whole document."""
    command = typer.main.get_command(app)
    return HEADER + "\n".join(describe_command("foretoken", command)) + "\n"


if __name__ == "__main__":
    TARGET.write_text(render(), "utf-8")
    print(f"wrote {TARGET}")
