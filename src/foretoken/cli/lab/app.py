"""Puts the lab's subcommands together. Knows no subcommand's options.

SIGTERM ends a run as Ctrl-C does, so that servers which it started end too.
"""

import signal
import threading
from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.lab import ab, audit, decide, export, lint, plan, record, tune
from foretoken.cli.options import write_commands


class LabGroup(TyperGroup):
    """Says of each command all of its first paragraph."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands(self, formatter)


lab_app = typer.Typer(
    help="Plan, measure and decide whether to speculate, for any OpenAI-style server.",
    no_args_is_help=True,
    cls=LabGroup,
    rich_markup_mode=None,
)


@lab_app.callback()
def main() -> None:
    """Plan, measure and decide whether to speculate, for any OpenAI-style server."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


for module in (plan, lint, tune, ab, decide, export, audit, record):
    name = module.__name__.rpartition(".")[-1]
    lab_app.command(epilog=getattr(module, "EPILOG", None))(getattr(module, name))
