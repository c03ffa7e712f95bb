"""Puts the lab's subcommands together. Knows no subcommand's options.

SIGTERM ends a run as Ctrl-C does, so that servers which it started end too.
"""

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from foretoken.cli.lab import ab, audit, decide, export, lint, plan, record, tune
from foretoken.cli.options import write_commands
from foretoken.errors import ConfigError

GONE = {
    "bench": "`foretoken lab ab --candidate SERVER`, which measures one server alone",
    "dial": "`foretoken lab ab --force-acceptance 0,0.3,0.6,0.9`; loads: --grid concurrency=1,8",
    "fit": "`foretoken lab decide RUN... --fit`",
    "mock": "a packaged model, `foretoken serve demo`; in the sources tests/mock_server",
    "report": "`foretoken lab decide RUN... --html FILE`; numbers: --json",
    "simulate": "`foretoken lab plan`, or in the sources `python -m benchmarks.simulate`",
    "sweep": "`foretoken lab ab --grid concurrency=1,8,32`",
    "verify": "`foretoken lab audit SERVER --baseline SERVER`: its checks greedy, seeds, sampling",
    "watch": "a monitor of the server's metrics: Prometheus with deploy/foretoken-rules.yml",
    "whatif": "`foretoken lab decide RUN --k 1,2,4`, or measure it: `foretoken lab tune SERVER`",
}
"""Commands of earlier versions, and what does their work now."""
_PLAN = "nothing: `foretoken lab plan MODEL --device D` says which --drafter to name"
GONE_OPTIONS: dict[tuple[str, str], tuple[Callable[[str], Any] | None, str]] = {
    ("ab", "--until-decided"): (
        None, "nothing: `ab` measures until it knows; --blocks N takes exactly so many"),
    ("ab", "--most-minutes"): (float, "--minutes, the most that all may take"),
    ("ab", "--price"): (
        str, "nothing: a token's cost is the server's price over its tokens/s, which `ab` prints"),
    ("ab", "--diagnose"): (None, "--grid class=A,B, which runs each class by itself"),
    ("decide", "--reference"): (str, "the other run beside the first: the table has both rates"),
    ("decide", "--csv"): (
        str, "--json, which has every rule; summary.json of a run has gains block by block, and "
        "requests.jsonl its requests"),
    ("plan", "--eager-draft"): (
        None, "nothing: `foretoken lab tune SERVER` measures drafters, with graphs or without"),
    ("plan", "--measured"): (
        str, "nothing: `lab tune SERVER` measures other lengths and drafters; of a run, "
        "`lab decide RUN --fit` says what they cost, --k what another length would have done"),
    ("tune", "--device"): (str, _PLAN),
    ("tune", "--count"): (int, _PLAN),
}  # fmt: skip
"""Options of earlier versions by command: the type of the value, None for a switch, and what does
their work now."""


class LabGroup(TyperGroup):
    """Says of each command all of its first paragraph, of an earlier one what does its work now."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        write_commands(self, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the first word names. Raises ConfigError: it, or an option, is one
        of an earlier version."""
        if args[0] in GONE:
            raise ConfigError("COMMAND", f"lab {args[0]}", GONE[args[0]])
        for place, word in enumerate(args):
            option, _, value = word.partition("=")
            if (args[0], option) in GONE_OPTIONS:
                kind, instead = GONE_OPTIONS[args[0], option]
                given: Any = "an option of an earlier version"
                if kind is not None:
                    given = value or " ".join(args[place + 1 : place + 2])
                    with suppress(ValueError):
                        given = kind(given)
                raise ConfigError(option, given, instead)
        return super().resolve_command(ctx, args)


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
