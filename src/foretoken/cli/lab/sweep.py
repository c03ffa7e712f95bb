"""`foretoken lab sweep` and `foretoken lab dial`: an A/B per cell, or per level of acceptance."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab.options import (
    BlocksOption,
    ConfigArgument,
    JsonOption,
    LoadOption,
    OutOption,
    RequestsOption,
    ResumeOption,
    SetOption,
    Shortcuts,
    TokensOption,
    WorkloadOption,
    parse_load,
    parse_numbers,
)

if TYPE_CHECKING:
    from foretoken.lab.experiments import AbConfig

BaselineOption = Annotated[str | None, typer.Option(help="A URL, or a command with {port}.")]
DryOption = Annotated[bool, typer.Option("--dry-run", help="List the cells, and stop.")]


def sweep(
    config: ConfigArgument = None,
    baseline: BaselineOption = None,
    candidate: Annotated[
        str | None, typer.Option(help="As the baseline; may have {k}, {method} ... of the grid.")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="NAME=VALUES", help="Such as k=1,3,5; several times."),
    ] = None,
    out: OutOption = Path("lab-sweep"),
    workload: WorkloadOption = None,
    load: LoadOption = None,
    blocks: BlocksOption = None,
    requests: RequestsOption = None,
    max_tokens: TokensOption = None,
    setting: SetOption = None,
    resume: ResumeOption = False,
    dry_run: DryOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run an A/B in every cell of a grid; temperatures 0, 0.4, 0.8 and 1 without one."""
    from rich.table import Table

    from foretoken.cli.lab.progress import live_view
    from foretoken.cli.lab.tables import console, show_number
    from foretoken.lab.sweep import apply, cells_of, describe, run_sweep

    short = Shortcuts(workload=workload, load=load, blocks=blocks, requests=requests,
                      max_tokens=max_tokens)  # fmt: skip
    settings = _settings(config, (baseline, candidate), short, out, setting)
    axes = parse_grid(grid or ["temperature=0,0.4,0.8,1"])
    cells = cells_of(axes)
    for values in cells:
        apply(settings, values)
    if dry_run:
        print(json.dumps({"cells": cells}))
        return
    with live_view() as watch:
        found = run_sweep(settings, axes, out, resume=resume, watch=watch)
    table = Table(*axes, "acceptance", "TPOT P50 gain", "TPOT P99 gain", "tokens/s gain")
    for cell in found:
        gains = (cell.gain(name) for name in ("tpot_p50", "tpot_p99", "tokens_per_s"))
        table.add_row(
            *(str(value) for value in cell.values.values()),
            show_number(cell.acceptance), *(show_number(gain) for gain in gains),
        )  # fmt: skip
    console().print(table)
    if as_json:
        print(json.dumps({"cells": [describe(cell) for cell in found]}))


def dial(
    config: ConfigArgument = None,
    baseline: BaselineOption = None,
    candidate: Annotated[
        str | None, typer.Option(help="A command with {rates:K}, {length:K} or {rate}.")
    ] = None,
    rates: Annotated[str, typer.Option(help="Chances of a draft token.")] = "0,0.3,0.6,0.9",
    loads: Annotated[
        list[str] | None, typer.Option("--at", metavar="LOAD", help="A load; several times.")
    ] = None,
    metric: Annotated[str, typer.Option(help="The gain that has to reach 1.")] = "tpot_mean",
    out: OutOption = Path("lab-dial"),
    workload: WorkloadOption = None,
    blocks: BlocksOption = None,
    requests: RequestsOption = None,
    max_tokens: TokensOption = None,
    setting: SetOption = None,
    resume: ResumeOption = False,
    as_json: JsonOption = False,
) -> None:
    """Force acceptance and find the rate at which speculation breaks even, at every load."""
    from foretoken.cli.lab.progress import live_view
    from foretoken.cli.lab.tables import console, show_number
    from foretoken.lab.dial import DialPlan, run_dial
    from foretoken.lab.plain import to_plain

    short = Shortcuts(workload=workload, blocks=blocks, requests=requests, max_tokens=max_tokens)
    settings = _settings(config, (baseline, candidate), short, out, setting)
    plan = DialPlan(
        rates=tuple(parse_numbers(rates, "--rates")),
        loads=tuple(parse_load(text) for text in loads or ["closed:1"]),
        metric=metric,
    )
    with live_view() as watch:
        found = run_dial(settings, plan, out, resume=resume, watch=watch)
    show = console()
    for row in found:
        show.print(f"{row.load}: breaks even at a draft acceptance rate of {show_number(row.rate)}")
        for rate, gain in row.points:
            show.print(f"  at {rate:.2f}: {row.metric} {show_number(gain)}", style="dim")
    if as_json:
        print(json.dumps({"break_even": to_plain(found)}))


def parse_grid(texts: list[str]) -> dict[str, list[Any]]:
    """Names and values of `--grid`; values are YAML between commas, or a YAML list.

    Raises:
        ConfigError: a text has no `=`.
    """
    from foretoken.errors import ConfigError
    from foretoken.lab.experiments import parse_yaml

    axes: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError("--grid", text, "such as k=1,3,5")
        whole = parse_yaml(values, f"--grid {name}") if values.startswith("[") else None
        axes[name] = whole if isinstance(whole, list) else [
            parse_yaml(value, f"--grid {name}") for value in values.split(",")
        ]  # fmt: skip
    return axes


def _settings(
    config: Path | None,
    arms: tuple[str | None, str | None],
    short: Shortcuts,
    out: Path,
    setting: list[str] | None,
) -> "AbConfig":
    from foretoken.lab.experiments import AbConfig, arm_of, load_settings

    overrides = short.overrides(out)
    for name, given, label in zip(("baseline", "candidate"), arms, ("off", "on"), strict=True):
        if given is not None:
            overrides.append(f"{name}={json.dumps(arm_of(given, label))}")
    return load_settings(AbConfig, config, [*overrides, *(setting or ())])
