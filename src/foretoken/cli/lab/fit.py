"""`foretoken lab fit` and `foretoken lab whatif`: what a finished A/B says beyond its ratios."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import JsonOption
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.analysis.whatif import Costs, Gate, WhatIf
    from foretoken.lab.records.results import RequestRecord

RunArgument = Annotated[Path, typer.Argument(help="The folder that `foretoken lab ab` wrote.")]


def fit(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Folders of `lab ab` or `lab sweep`; several loads give a crossover."),
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


def whatif(
    run: RunArgument,
    k: Annotated[str, typer.Option("-k", help="Draft lengths between commas.")] = "1,2,3,4,5,6,8",
    gate: Annotated[
        str | None,
        typer.Option(metavar="MISSES:PAUSE", help="Leave drafts out after so many misses."),
    ] = None,
    verify_per_draft: Annotated[
        float | None, typer.Option(help="Cost of one more row, in plain steps; from `fit`.")
    ] = None,
    draft_cost: Annotated[float, typer.Option(help="c, in plain steps; from `fit`.")] = 0.0,
    costs: Annotated[
        Path | None, typer.Option(help="Costs that an engine kept, in place of those two.")
    ] = None,
    batch: Annotated[
        int, typer.Option(min=1, help="Requests in flight for which --costs are asked.")
    ] = 1,
    depth_free: Annotated[
        bool,
        typer.Option("--depth-free", help="The drafter is a model or n-gram, not a head."),
    ] = False,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="ngram or suffix too, on recorded texts; several times."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay other draft lengths and gates on the recorded accept stream, and look-up methods.

    A look-up needs the texts, of an A/B with --set keep_text=true, and is replayed word by word:
    an estimate. Exit code 0: replayed; 2: no A/B there, no accept stream in it, or no texts.
    """
    from foretoken.cli.lab.options import parse_whole
    from foretoken.lab.analysis.summary import counted
    from foretoken.lab.analysis.warm_up import without_start
    from foretoken.lab.analysis.whatif import WhatIf, what_if, what_if_looked_up
    from foretoken.lab.plain import to_plain
    from foretoken.lab.records.run_files import read_ab, read_requests

    summary = read_ab(run, "RUN")
    records = counted(without_start(read_requests(run)).records, summary.candidate)
    known = _costs(verify_per_draft, draft_cost, costs, batch)
    lengths = parse_whole(k, "-k")
    found: tuple[WhatIf, ...] = ()
    if not methods or any(r.acceptance and r.acceptance.per_step_accepted for r in records):
        found = what_if(records, lengths, _gates(gate), costs=known, depth_free=depth_free)
    if methods:
        found += what_if_looked_up(summary, records, lengths, methods, costs=known)
    _show(found)
    if as_json:
        print(json.dumps(to_plain(list(found))))


def _show(found: "tuple[WhatIf, ...]") -> None:
    from rich.table import Table

    from foretoken.cli.lab.run_tables import console

    table = Table("method", "k", "gate", "tokens/step", "between", "rate", "speed-up", "")
    for row in found:
        rule = f"{row.gate.misses}:{row.gate.pause}" if row.gate.misses else "-"
        table.add_row(
            row.method, str(row.k), rule, f"{row.tokens_per_step:.2f}",
            f"{row.least:.2f}-{row.most:.2f}",
            f"{row.acceptance_rate:.2f}", f"{row.speedup:.2f}" if row.speedup else "-", row.label,
        )  # fmt: skip
    console().print(table)


def _costs(
    verify_per_draft: float | None, draft_cost: float, file: Path | None, batch: int
) -> "Costs | None":
    """What steps take: by an engine's models of time, or by two numbers."""
    from foretoken.lab.analysis.whatif import Costs
    from foretoken.lab.simulate.machine import machine_of_costs

    if file is None:
        if verify_per_draft is None:
            return None
        return Costs.in_plain_steps(verify_per_draft, draft_cost)
    if verify_per_draft is not None:
        raise ConfigError("--verify-per-draft", verify_per_draft, "nothing beside --costs")
    return Costs(machine=machine_of_costs(file), sequences=batch)


def _gates(text: str | None) -> "list[Gate]":
    """No gate, and the one that `--gate` means."""
    from foretoken.lab.analysis.whatif import Gate

    if text is None:
        return [Gate()]
    misses, _, pause = text.partition(":")
    try:
        gate = Gate(misses=int(misses), pause=int(pause))
    except ValueError:
        gate = Gate()
    if min(gate.misses, gate.pause) < 1:
        raise ConfigError("--gate", text, "MISSES:PAUSE, whole numbers above 0, such as 2:8")
    return [Gate(), gate]
