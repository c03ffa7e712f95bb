"""Puts the lab's subcommands together. Knows no subcommand's options.

SIGTERM ends a run as Ctrl-C does, so that servers which it started end too.
"""

import signal
import threading

import typer

from foretoken.cli.help import WholeGroup
from foretoken.cli.lab.ab import ab
from foretoken.cli.lab.answers.audit import audit
from foretoken.cli.lab.answers.verify import verify
from foretoken.cli.lab.bench import bench
from foretoken.cli.lab.decide import EPILOG as DECIDE_EPILOG
from foretoken.cli.lab.decide import decide
from foretoken.cli.lab.export import EPILOG as EXPORT_EPILOG
from foretoken.cli.lab.export import export
from foretoken.cli.lab.fit import fit, whatif
from foretoken.cli.lab.lint import EPILOG as LINT_EPILOG
from foretoken.cli.lab.lint import lint
from foretoken.cli.lab.plan import EPILOG as PLAN_EPILOG
from foretoken.cli.lab.plan import plan
from foretoken.cli.lab.report import EPILOG as REPORT_EPILOG
from foretoken.cli.lab.report import report
from foretoken.cli.lab.servers import mock, record
from foretoken.cli.lab.simulate import simulate
from foretoken.cli.lab.sweep import dial, sweep
from foretoken.cli.lab.tuning.tune import EPILOG as TUNE_EPILOG
from foretoken.cli.lab.tuning.tune import tune
from foretoken.cli.lab.watch import watch

lab_app = typer.Typer(
    help="Plan, measure and decide whether to speculate, for any OpenAI-style server.",
    no_args_is_help=True,
    cls=WholeGroup,
    rich_markup_mode=None,
)


@lab_app.callback()
def main() -> None:
    """Plan, measure and decide whether to speculate, for any OpenAI-style server."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)


lab_app.command(epilog=PLAN_EPILOG)(plan)
lab_app.command(epilog=LINT_EPILOG)(lint)
lab_app.command(epilog=TUNE_EPILOG)(tune)
lab_app.command()(bench)
lab_app.command()(ab)
lab_app.command(epilog=DECIDE_EPILOG)(decide)
lab_app.command(epilog=REPORT_EPILOG)(report)
lab_app.command(epilog=EXPORT_EPILOG)(export)
for command in (sweep, dial, fit, whatif, simulate, verify, audit, record, watch, mock):
    lab_app.command()(command)
