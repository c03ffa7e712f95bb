"""`foretoken lab fit`: what a finished A/B says beyond its ratios."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import JsonOption

if TYPE_CHECKING:
    from foretoken.lab.records.results import RequestRecord


def fit(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `lab ab`, grids too; several loads give a crossover."),
    ],
    out: Annotated[Path | None, typer.Option(help="Write the fit there as JSON.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Fit verify cost, draft cost, break-even acceptance and crossover to A/Bs' step times.

    Several folders are those of one pair of servers at several loads. Exit code 0: fitted; 2: no
    A/B there, or its answers tell neither steps nor drafts.
    """
    from rich.table import Table

    from foretoken.cli.lab.run_tables import console, show_number
    from foretoken.lab.analysis.fit import fit_arms, of_runs
    from foretoken.lab.analysis.summary import counted
    from foretoken.lab.analysis.warm_up import without_start
    from foretoken.lab.decide.evidence import show_part
    from foretoken.lab.plain import to_plain
    from foretoken.lab.records.run_files import ab_folders, read_ab, read_requests, write_json

    arms: tuple[list[list[RequestRecord]], ...] = ([], [])
    for run in ab_folders(runs):
        summary = read_ab(run, "RUNS")
        records = without_start(read_requests(run)).records
        for own, name in zip(arms, (summary.baseline, summary.candidate), strict=True):
            own.append(counted(records, name))
    found = fit_arms(of_runs(arms[0]), of_runs(arms[1]))
    show = console()
    table = Table("batch", "rows", "cost of a step that drafts", "break-even rate",
                  "speed-up at rate")  # fmt: skip
    for point in found.points:
        table.add_row(
            str(point.batch), str(point.rows), show_number(point.cost),
            show_number(point.break_even), show_number(point.speedup),
        )  # fmt: skip
    show.print(table)
    show.print(
        f"k {found.k:.2f}, acceptance rate {found.acceptance_rate:.2f}, "
        f"{show_part(found.draft_share)} of steps draft"
    )
    show.print(
        f"V {show_number(found.verify_cost)}, c {show_number(found.draft_cost)} (if rows of a "
        "verification cost what rows of a batch cost)"
    )
    show.print(
        f"crossover: batch {show_number(found.crossover_batch, 1)}, "
        f"{show_number(found.crossover_qps)} requests/s"
    )
    for note in found.notes:
        show.print(note, style="yellow")
    if out is not None:
        write_json(out, found)
    if as_json:
        print(json.dumps(to_plain(found)))
