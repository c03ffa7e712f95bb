"""`foretoken lab report`: options of the report."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from foretoken.cli.lab.options import JsonOption

EPILOG = "Exit code: 0: written; 2: no A/B there, a wrong policy, or matplotlib is missing."


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `lab ab`, grids too; several are judged together."),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder to write; default: `report` in the first run.")
    ] = None,
    policy: Annotated[str | None, typer.Option(metavar="FILE", help="As in `decide`.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="RULE.KEY=VALUE", help="As in `decide`.")
    ] = None,
    title: Annotated[str, typer.Option(help="The page's heading.")] = (
        "Should this server speculate?"
    ),
    as_json: JsonOption = False,
) -> None:
    """One self-contained HTML page with the verdict and every plot, and PNG, CSV, JSON lines."""
    import foretoken
    from foretoken.lab.decide.ship_policy import load_policy
    from foretoken.lab.report.html import Stamp, write_report
    from foretoken.lab.report.judged import read_runs

    rules = load_policy(policy, tuple(changes or ()))
    folder = out or runs[0] / "report"
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    stamp = Stamp(version=foretoken.__version__, when=when, title=title)
    written = write_report(folder, read_runs(runs, rules), rules, stamp)
    if as_json:
        print(json.dumps({"page": str(written[0]), "files": [str(path) for path in written]}))
        return
    typer.echo(f"{written[0]} and {len(written) - 1} more files")
