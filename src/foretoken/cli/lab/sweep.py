"""`foretoken lab sweep` and `foretoken lab dial`: an A/B per cell, or per level of acceptance."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from foretoken.cli.lab.options import (
    BaselineOption,
    Measuring,
    arms_of,
    measuring,
    parse_load,
    parse_numbers,
    tell_if_no_report,
)


@measuring("lab-sweep", "temperatures", "slo")
def sweep(
    shared: Measuring,
    baseline: BaselineOption = None,
    candidate: Annotated[
        str | None, typer.Option(help="As the baseline; may have {k}, {method} ... of the grid.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid",
            metavar="NAME=VALUES",
            help="Such as temperature=0,0.8, concurrency=1,8 or k=1,3,5; several times.",
        ),
    ] = None,
) -> None:
    """Run an A/B in every cell of a grid; temperatures 0, 0.4, 0.8 and 1 without one.

    Says for every cell where it breaks even, and along numbers where the gain passes 1. `lab
    decide` takes the folder. Exit code 0: measured; 1: an arm of a cell answered
    nothing; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import cells_table, console
    from foretoken.lab.analysis.crossover import crossings_of
    from foretoken.lab.measure.estimate import sizes_of
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.measure.sweep import apply, cells_of, describe, run_sweep
    from foretoken.lab.plain import to_plain

    settings = shared.settings(AbConfig, arms_of(baseline, candidate))
    axes = parse_grid(grid or ["temperature=0,0.4,0.8,1"])
    cells = cells_of(axes)
    planned = [apply(settings, values) for values in cells]
    if shared.dry_run and shared.as_json:
        print(json.dumps({"cells": cells}))
        return
    for values, cell in zip(cells, planned, strict=True):
        console().print(f"{_named(values)}: {sizes_of(cell)}", soft_wrap=True)
    if shared.dry_run:
        return
    tell_if_no_report()
    with live_view() as watch:
        found = run_sweep(settings, axes, shared.out, resume=shared.resume, watch=watch)
    summaries = [cell.summary for cell in found]
    crossings = crossings_of(summaries)
    show = console()
    show.print(cells_table({n: [str(c.values[n]) for c in found] for n in axes}, summaries))
    for crossing in crossings:
        show.print(crossing.says, soft_wrap=True)
    show.print(f"foretoken lab decide {shared.out}   judges these cells together", soft_wrap=True)
    if shared.as_json:
        rows = [describe(cell) for cell in found]
        print(json.dumps({"cells": rows, "crossings": to_plain(crossings)}))
    raise typer.Exit(1 if any(cell.dead for cell in found) else 0)


@measuring("lab-dial", "load", "temperatures", "slo")
def dial(
    shared: Measuring,
    baseline: BaselineOption = None,
    candidate: Annotated[
        str | None,
        typer.Option(help="A command with {rates:K}, {length:K}, {rate} or {percent}."),
    ] = None,
    rates: Annotated[str, typer.Option(help="Chances of a draft token.")] = "0,0.3,0.6,0.9",
    loads: Annotated[
        list[str] | None, typer.Option("--at", metavar="LOAD", help="A load; several times.")
    ] = None,
    metric: Annotated[str, typer.Option(help="The gain that has to reach 1.")] = "tpot_mean",
) -> None:
    """Force acceptance and find the rate at which speculation breaks even, at every load.

    `{rates:5}` in the candidate's command becomes a list of 5 rates, as Foretoken and vLLM take
    them in synthetic_acceptance_rates. Exit code 0: measured; 1: at some load nothing was
    answered; 2: wrong settings; 5: no server.
    """
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, show_number
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.measure.sweep import DialPlan, levels_of, run_dial
    from foretoken.lab.plain import to_plain

    settings = shared.settings(AbConfig, arms_of(baseline, candidate))
    plan = DialPlan(
        rates=tuple(parse_numbers(rates, "--rates")),
        loads=tuple(parse_load(text, "--at") for text in loads or ["closed:1"]),
        metric=metric,
    )
    if shared.dry_run:
        levels = [
            {"load": str(ab.load), "rate": rate, "candidate": ab.candidate.command}
            for level in levels_of(settings, plan)
            for rate, ab in level
        ]
        print(json.dumps({"levels": levels}))
        return
    with live_view() as watch:
        found = run_dial(settings, plan, shared.out, resume=shared.resume, watch=watch)
    show = console()
    for row in found:
        show.print(f"{row.load}: breaks even at a draft acceptance rate of {show_number(row.rate)}")
        for rate, gain in row.points:
            show.print(f"  at {rate:.2f}: {row.metric} {show_number(gain)}", style="dim")
    if shared.as_json:
        print(json.dumps({"break_even": to_plain(found)}))
    raise typer.Exit(0 if all(row.points for row in found) else 1)


def _named(values: Mapping[str, Any]) -> str:
    """`k=1, concurrency=8`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def parse_grid(texts: list[str]) -> dict[str, list[Any]]:
    """Names and values of `--grid`; values are YAML between commas, or a YAML list.

    Raises:
        ConfigError: a text has no `=`.
    """
    from foretoken.errors import ConfigError
    from foretoken.lab.measure.experiment import parse_yaml

    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            allowed = "NAME=VALUES, such as temperature=0,0.8, concurrency=1,8 or k=1,3,5"
            raise ConfigError("--grid", text, allowed)
        whole = parse_yaml(values, f"--grid {name}") if values.startswith("[") else None
        axes[name] = whole if isinstance(whole, list) else [
            parse_yaml(value, f"--grid {name}") for value in values.split(",")
        ]  # fmt: skip
    return axes
