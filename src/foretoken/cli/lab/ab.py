"""`foretoken lab ab`: two servers under the same traffic, or one; a grid of them; and a verdict."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.lab import options as o
from foretoken.errors import ConfigError
from foretoken.extras import EXTRA_OF

if TYPE_CHECKING:
    from foretoken.lab.decide.decision import Decision
    from foretoken.lab.decide.ship_policy import ShipPolicy
    from foretoken.lab.measure.experiment import AbConfig
    from foretoken.lab.measure.grid import Cell
    from foretoken.lab.measure.segments import Segment
    from foretoken.lab.verdict import Verdict

ENOUGH = {"sizes": {"blocks": 9, "requests_per_block": 120}}
"""Of a comparison, unless told otherwise: starts enough to compare, requests enough for a P95."""
MOST_MINUTES = 30.0
"""After which no blocks are added, unless told otherwise."""
EXIT_NOTHING = 4
PAGE = "page.html"
"""In the folder of the run."""
GridOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUES",
        help="Compare in every cell: temperature=0,0.8, concurrency=1,8, k=1,3,5; several times.",
    ),
]
ForceOption = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Chances of a draft token, such as 0,0.3,0.6,0.9: which acceptance breaks even?",
    ),
]
MinutesOption = Annotated[
    float | None,
    typer.Option(help="As much as fits into so many; 10 give a first answer.", min=0.1),
]
DiagnoseOption = Annotated[
    bool, typer.Option("--diagnose", help="Run every class alone too, to explain a P99 loss.")
]
PriceOption = Annotated[
    str | None, typer.Option(help="Of an hour of a server: 2.5, or off=2.5,on=3; gives costs.")
]
RestartOption = Annotated[
    str | None,
    typer.Option(
        metavar="SHELL",
        help="Restarts a server given as a URL before each of its blocks; {arm} is off or on.",
    ),
]
PageOption = Annotated[bool, typer.Option("--page/--no-page", help="Write the page of plots.")]
DecidedOption = Annotated[bool, typer.Option("--until-decided", hidden=True)]
MostOption = Annotated[float | None, typer.Option("--most-minutes", hidden=True)]


def ab(
    config: o.ConfigArgument = None,
    baseline: o.BaselineOption = None,
    candidate: o.CandidateOption = None,
    workload: o.WorkloadOption = None,
    strict: o.StrictOption = False,
    load: o.LoadOption = None,
    grid: GridOption = None,
    force_acceptance: ForceOption = None,
    blocks: o.BlocksOption = None,
    requests: o.RequestsOption = None,
    minutes: MinutesOption = None,
    max_tokens: o.TokensOption = None,
    temperatures: o.TemperatureOption = None,
    slo: o.SloOption = None,
    price: PriceOption = None,
    diagnose: DiagnoseOption = False,
    restart_command: RestartOption = None,
    policy: Annotated[Path | None, typer.Option(help="Rules, as in `decide`.")] = None,
    setting: o.SetOption = None,
    out: o.OutOption = Path("lab-ab"),
    page: PageOption = True,
    resume: o.ResumeOption = False,
    dry_run: o.DryRunOption = False,
    as_json: o.JsonOption = False,
    until_decided: DecidedOption = False,
    most_minutes: MostOption = None,
) -> None:
    """Compare two servers, or two settings of one, under the same prompts and arrivals.

    Blocks alternate; a server given as a command starts anew for each. One given as a URL is one
    start, whose luck widens all intervals, unless --restart-command restarts it. 9 blocks of 120
    requests, then more until the verdict is known or half an hour is over; --blocks takes exactly
    so many. One server alone is measured without a verdict. A grid, and forced acceptance ({rate},
    {rates:K}, {length:K} or {percent} in the candidate's command), take 8 blocks of 30 a cell.

    Says how long it takes before it begins; the verdict is the last line, `lab decide` judges
    again. Exit code 0: USE IT, or measured without a verdict; 1: LEAVE IT OFF; 4: MEASURE MORE, or
    nothing was answered; 2: wrong settings; 5: no server.
    """
    _refuse_gone(until_decided, most_minutes)
    if minutes is not None and not resume and (grid or force_acceptance or blocks):
        raise ConfigError("--minutes", minutes, "none beside --blocks, or with cells of a grid")
    short = o.Shortcuts(workload=workload, strict=strict, load=load, blocks=blocks,
                        requests=requests, max_tokens=max_tokens, temperatures=temperatures,
                        slo=slo)  # fmt: skip
    own = [*_own(price, diagnose), *_restarts((baseline, candidate), restart_command)]
    changes = [*short.overrides(out, dry_run=dry_run), *o.arms_of(baseline, candidate), *own]
    axes = _axes(grid or [], force_acceptance)
    settings, rules = _settings(config, [*changes, *(setting or ())], axes)
    order = _Order(settings=settings, axes=axes, policy=_policy(policy, rules), out=out,
                   minutes=minutes, fixed=blocks is not None, page=page, resume=resume,
                   as_json=as_json)  # fmt: skip
    if dry_run:
        _show_plan(order)
        return
    with _kept(out):
        raise typer.Exit(_measure(order))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What is measured, and what is made of it."""

    settings: "AbConfig"
    axes: Mapping[str, Sequence[Any]]
    policy: "ShipPolicy"
    out: Path
    minutes: float | None
    fixed: bool
    """Whether the blocks are not to become more."""
    page: bool
    resume: bool
    as_json: bool


def _refuse_gone(until_decided: bool, most_minutes: float | None) -> None:
    """Say what became of options of earlier versions."""
    if until_decided:
        allowed = "nothing: `ab` measures until it knows; --blocks N takes exactly so many"
        raise ConfigError("--until-decided", "an option of an earlier version", allowed)
    if most_minutes is not None:
        raise ConfigError("--most-minutes", most_minutes, "--minutes, the most that all may take")


def _own(price: str | None, diagnose: bool) -> list[str]:
    """The command's own options as `--set` would say them."""
    changes = ["diagnose=true"] if diagnose else []
    if price is not None:
        changes.append(f"price_per_hour={json.dumps(o.parse_prices(price))}")
    return changes


def _restarts(arms: tuple[str | None, str | None], command: str | None) -> list[str]:
    """`--restart-command` as `--set` would say it, for every arm that is a URL or in the file.

    Raises:
        ConfigError: both arms are commands, which are started anew anyway.
    """
    if command is None:
        return []
    given = zip(("baseline", "candidate"), arms, strict=True)
    names = [name for name, text in given if text is None or text.startswith("http")]
    if not names:
        allowed = "none beside two commands with {port}, which are started anew for every block"
        raise ConfigError("--restart-command", command, allowed)
    return [f"{name}.restart_command={json.dumps(command)}" for name in names]


def _axes(grid: list[str], force: str | None) -> dict[str, list[Any]]:
    """The axes of `--grid`, and that of forced acceptance, which turns fastest."""
    from foretoken.lab.measure.grid import FORCED

    axes = o.parse_grid(grid)
    return axes if force is None else {**axes, FORCED: o.parse_numbers(force, "--force-acceptance")}


def _settings(
    file: Path | None, changes: list[str], axes: Mapping[str, Sequence[Any]]
) -> "tuple[AbConfig, list[str]]":
    """The settings of the measurement, and those of `--set` that are rules of the policy.

    Raises:
        ConfigError: something in them is wrong, or there is one server where two are needed.
    """
    from foretoken.lab.decide.rules import RULES
    from foretoken.lab.measure.experiment import AbConfig, load_settings
    from foretoken.lab.measure.grid import FORCED, apply, cells_of

    rules = [change for change in changes if change.split("=")[0].split(".")[0] in RULES]
    changes = [change for change in changes if change not in rules]
    try:
        found = load_settings(AbConfig, file, changes, {} if axes else ENOUGH)
        found = found if found.compared else load_settings(AbConfig, file, changes)
    except ConfigError as error:
        name = error.field.removeprefix("settings.").removesuffix(".file")
        if name != "workload" or error.given is not None:
            raise
        allowed = "a file of prompts or a trace, or demo"
        raise ConfigError("--workload", None, allowed) from error
    if axes or rules:
        found.require_two()
    if rules and FORCED in axes:
        raise ConfigError("--set", rules[0], "no rule: forced acceptance gets no verdict")
    for values in cells_of(axes) if axes else ():
        apply(found, values)
    return found, rules


def _policy(file: Path | None, rules: list[str]) -> "ShipPolicy":
    from foretoken.lab.decide.ship_policy import load_policy

    return load_policy(str(file) if file else None, tuple(rules))


@contextmanager
def _kept(out: Path) -> Iterator[None]:
    """Say what is left where a run is stopped."""
    try:
        yield
    except KeyboardInterrupt as error:
        typer.echo(f"stopped; what is measured is in {out}, --resume goes on", err=True)
        raise typer.Exit(o.EXIT_STOPPED) from error


def _show_plan(order: _Order) -> None:
    """What `--dry-run` answers: servers that run already are asked, none is started."""
    from foretoken.errors import EndpointError
    from foretoken.lab.measure.ab import plan_ab
    from foretoken.lab.measure.estimate import announce, probe, without_asking
    from foretoken.lab.measure.grid import apply, cells_of
    from foretoken.lab.measure.traces import load_items

    settings = order.settings
    if order.axes:
        cells = [apply(settings, values) for values in cells_of(order.axes)]
        if order.as_json:
            commands = [cell.candidate.command for cell in cells if cell.candidate is not None]
            print(json.dumps({"cells": cells_of(order.axes), "candidates": commands}))
        else:
            _say_cells(order)
        return
    items = load_items(settings.workload)[0]
    segments = plan_ab(settings, items)
    if order.as_json:
        print(json.dumps({"segments": [_row(segment) for segment in segments]}))
    for s in () if order.as_json else segments:
        typer.echo(
            f"block {s.block + 1} {s.arm.name}: {len(s.warm_up)} + {len(s.items)} requests, "
            f"{s.load}, {s.arm.url or s.arm.command}",
            err=True,
        )
    text = without_asking(settings)
    if not any(arm.starts_anew for arm in settings.arms):
        try:
            text = announce(settings, probe(settings, items, order.out / "logs"))
        except EndpointError as error:
            text += f" ({error})"
    _say(text)


def _row(segment: "Segment") -> dict[str, Any]:
    return {
        "block": segment.block,
        "arm": segment.arm.name,
        "server": segment.arm.url or segment.arm.command,
        "requests": len(segment.items),
        "warm_up": len(segment.warm_up),
        "load": str(segment.load),
    }


def _say(text: str, style: str = "") -> None:
    from foretoken.cli.lab.run_tables import console

    console().print(text, style=style, soft_wrap=True, markup=False)


def _say_cells(order: _Order) -> None:
    """What every cell of a grid will measure."""
    from foretoken.lab.measure.estimate import sizes_of
    from foretoken.lab.measure.grid import apply, cells_of

    for values in cells_of(order.axes):
        _say(f"{_named(values)}: {sizes_of(apply(order.settings, values))}")


def _named(values: Mapping[str, Any]) -> str:
    """`k=1, concurrency=8`."""
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _measure(order: _Order) -> int:
    """Measure and say what was found; the exit code."""
    if order.page and order.settings.compared and find_spec("matplotlib") is None:
        typer.echo(
            "no page will be written, for want of matplotlib: "
            f'pip install "foretoken[{EXTRA_OF["matplotlib"]}]" (the verdict does without)',
            err=True,
        )
    if order.axes:
        return _measure_grid(order)
    order = _timed(order)
    return _measure_two(order) if order.settings.compared else _measure_one(order)


def _timed(order: _Order) -> _Order:
    """Ask each server once, say how long it will take, and with `minutes` measure what fits."""
    from foretoken.lab.measure.estimate import announce, fit_into, probe
    from foretoken.lab.measure.segments import require_new
    from foretoken.lab.measure.traces import load_items

    settings = order.settings
    if order.resume:
        return order
    require_new(order.out)
    paces = probe(settings, load_items(settings.workload)[0], order.out / "logs")
    if order.minutes is not None:
        settings = fit_into(settings, paces, 60 * order.minutes)
    _say(announce(settings, paces))
    return replace(order, settings=settings)


def _measure_one(order: _Order) -> int:
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, print_arms
    from foretoken.lab.measure.ab import run_arms
    from foretoken.lab.plain import to_plain
    from foretoken.lab.records.results import RunSummary

    with live_view() as watch:
        watch.expect(order.settings.sizes.blocks, order.out, 1)
        found = run_arms(order.settings, order.out, resume=order.resume, watch=watch)
    assert isinstance(found, RunSummary), order.settings.arms
    print_arms(console(), [found.arm])
    if order.as_json:
        print(json.dumps(to_plain(found)))
    other = "--candidate" if order.settings.candidate is None else "--baseline"
    _say(f"one server was measured; with {other} it is compared with another", "dim")
    return EXIT_NOTHING if found.arm.num_errors == found.arm.num_requests else 0


def _measure_two(order: _Order) -> int:
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import console, print_ab
    from foretoken.lab.decide.until import UntilLimits, run_until_decided
    from foretoken.lab.plain import to_plain

    decisions: list[Decision] = []
    with live_view() as watch:

        def tell(blocks: int, decision: "Decision | None") -> None:
            if decisions:
                last = decisions[-1]
                watch.say(f"{last.verdict} after {last.num_blocks} blocks: {last.sentence}")
            decisions.extend([decision] if decision is not None else [])
            watch.expect(blocks, order.out, 2)

        most_s = 0.0 if order.fixed else 60 * (order.minutes or MOST_MINUTES)
        summary = run_until_decided(
            order.settings, order.out, order.policy, UntilLimits(most_s=most_s, tell=tell),
            resume=order.resume, watch=watch,
        )  # fmt: skip
    print_ab(console(), summary)
    found, told = _concluded([order.out], order)
    if order.as_json:
        print(json.dumps({**to_plain(summary), **told}))
    _say(found.sentence, found.style)
    return found.exit_code


def _measure_grid(order: _Order) -> int:
    from foretoken.cli.lab.live_view import live_view
    from foretoken.cli.lab.run_tables import cells_table, console
    from foretoken.lab.analysis.crossover import crossings_of
    from foretoken.lab.measure.grid import FORCED, folder_of, run_grid
    from foretoken.lab.plain import to_plain

    _say_cells(order)
    with live_view() as watch:
        cells = run_grid(order.settings, order.axes, order.out, resume=order.resume, watch=watch)
    summaries = [cell.summary for cell in cells]
    names = {name: [str(cell.values[name]) for cell in cells] for name in order.axes}
    console().print(cells_table(names, summaries))
    rows = [cell.row() for cell in cells]
    if FORCED in order.axes:
        return _say_break_evens(cells, rows, order)
    crossings = crossings_of(summaries)
    for crossing in crossings:
        _say(crossing.says)
    folders = [order.out / folder_of(cell.values) for cell in cells]
    found, told = _concluded(folders, order)
    if order.as_json:
        print(json.dumps({"cells": rows, "crossings": to_plain(crossings), **told}))
    _say(found.sentence, found.style)
    return found.exit_code


def _say_break_evens(cells: "Sequence[Cell]", rows: list[dict[str, Any]], order: _Order) -> int:
    """Forced acceptance has no verdict: its texts are garbage."""
    from foretoken.cli.lab.run_tables import show_number
    from foretoken.lab.measure.grid import break_evens
    from foretoken.lab.plain import to_plain

    found = break_evens(cells)
    for row in found:
        where = _named(row.values) or row.load
        _say(f"{where}: breaks even at a draft acceptance rate of {show_number(row.rate)}")
        for rate, gain in row.points:
            _say(f"  at {rate:.2f}: {row.metric} {show_number(gain)}", "dim")
    if order.as_json:
        print(json.dumps({"cells": rows, "break_even": to_plain(found)}))
    return 0 if all(row.points for row in found) else EXIT_NOTHING


def _concluded(runs: Sequence[Path], order: _Order) -> "tuple[Verdict, dict[str, Any]]":
    """The verdict on all that was measured, and what is told of it as JSON; the page is written
    where there is something to draw and something to draw with."""
    from foretoken.lab.decide.overall import judge_runs
    from foretoken.lab.plain import to_plain
    from foretoken.lab.report.page import write_page
    from foretoken.lab.report.runs import read_runs

    found = read_runs(runs, order.policy)
    best = judge_runs([(run.summary, run.decision) for run in found], order.policy)
    dead = any(arm.num_errors == arm.num_requests for run in found for arm in run.arms)
    if order.page and not dead and find_spec("matplotlib") is not None:
        write_page(order.out / PAGE, found, best, order.policy.name)
        typer.echo(f"{order.out / PAGE}", err=True)
    said = best.conclusion
    told = {"verdict": said.word, "sentence": best.sentence, "decision": to_plain(best.best),
            "exit_code": said.exit_code}  # fmt: skip
    return said, told
