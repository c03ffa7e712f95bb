"""Puts the subcommands together and turns Foretoken's errors into one line and an exit code.

Knows no subcommand's options. Unexpected exceptions keep their traceback: they are bugs.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import foretoken
from foretoken.cli.chat import chat
from foretoken.cli.compare import EPILOG, compare
from foretoken.cli.demo import demo
from foretoken.cli.generate import generate
from foretoken.cli.info import info
from foretoken.cli.lab.app import lab_app
from foretoken.cli.options import write_commands
from foretoken.cli.quantize import quantize
from foretoken.cli.serve import serve
from foretoken.cli.serve_options import ServeCommand
from foretoken.cli.train import train_app
from foretoken.engine.logs import chosen_level
from foretoken.errors import ForetokenError
from foretoken.extras import OptionalPackages
from foretoken.hardware import check_temporary_folder


class ForetokenGroup(TyperGroup):
    """Answers an error of the tree with its message on stderr and its exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the subcommand."""
        try:
            with OptionalPackages("this command"), _temporary_folder():
                result = super().invoke(ctx)
        except ForetokenError as error:
            print(f"foretoken: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        return result

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one row per subcommand."""
        write_commands(self, formatter)


@contextmanager
def _temporary_folder() -> Iterator[None]:
    """Within, its lack is a ConfigError, wherever it is found."""
    try:
        yield
    except FileNotFoundError as error:
        if error.filename is None:  # as the standard library raises it
            check_temporary_folder()
        raise


app = typer.Typer(
    name="foretoken",
    cls=ForetokenGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"foretoken {foretoken.__version__}")
        raise typer.Exit()


@app.callback()
def foretoken_command(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what the engine decides and does.")
    ] = False,
) -> None:
    """Lossless speculative decoding: the same tokens, sooner."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("foretoken").setLevel("INFO" if verbose else chosen_level() or "WARNING")


app.command()(generate)
app.command()(chat)
app.command()(demo)
app.command(epilog=EPILOG)(compare)
app.command()(info)
app.command()(quantize)
app.command(cls=ServeCommand)(serve)
app.add_typer(train_app, name="train")
app.add_typer(lab_app, name="lab")
