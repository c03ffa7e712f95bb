"""Puts the lab's subcommands together. Knows no subcommand's options."""

import typer

lab_app = typer.Typer(
    help="Plan, measure and decide whether to speculate, for any OpenAI-style server.",
    no_args_is_help=True,
)


@lab_app.callback()
def main() -> None:
    """Plan, measure and decide whether to speculate, for any OpenAI-style server."""
