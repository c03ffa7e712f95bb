"""What `foretoken lab ab` does once its settings are known: plans, measures, shows and judges.

Writes to stderr only, so that --json stays alone on stdout.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress

from foretoken.cli.lab.options import EXIT_STOPPED
from foretoken.cli.lab.run_tables import (
    cells_table,
    console,
    print_ab,
    print_arms,
    say,
    show_number,
)
from foretoken.errors import EndpointError
from foretoken.extras import EXTRA_OF
from foretoken.lab.decide.decision import Decision
from foretoken.lab.decide.overall import judge_runs, read_runs
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.decide.until import UntilLimits, run_until_decided
from foretoken.lab.measure import grid
from foretoken.lab.measure.ab import plan_ab, run_ab
from foretoken.lab.measure.estimate import announce, announce_unasked, fit_into, probe
from foretoken.lab.measure.experiment import AbConfig
from foretoken.lab.measure.segments import Segment, require_new
from foretoken.lab.measure.workload import load_items
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.verdict import Verdict

MOST_MINUTES = 30.0
"""After which no blocks are added, unless told otherwise."""
EXIT_NOTHING = 4
PAGE = "page.html"
"""In the folder of the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AbOrder:
    settings: AbConfig
    axes: Mapping[str, Sequence[Any]]
    policy: ShipPolicy
    out: Path
    minutes: float | None
    fixed: bool
    """Whether the blocks are not to become more."""
    page: bool
    resume: bool
    as_json: bool


def run(order: AbOrder, *, dry_run: bool) -> int:
    """Do what is ordered, or say what that would be; the exit code. Raises ConfigError: wrong
    settings; EndpointError: a server is not there."""
    if dry_run:
        _show_plan(order)
        return 0
    try:
        return _measure(order)
    except KeyboardInterrupt as error:
        typer.echo(f"stopped; what is measured is in {order.out}, --resume goes on", err=True)
        raise typer.Exit(EXIT_STOPPED) from error


def _show_plan(order: AbOrder) -> None:
    """What `--dry-run` answers: servers that run already are asked, none is started."""
    settings = order.settings
    if order.axes:
        cells = [grid.apply(settings, values) for values in grid.cells_of(order.axes)]
        if order.as_json:
            commands = [cell.candidate.command for cell in cells if cell.candidate is not None]
            print(json.dumps({"cells": grid.cells_of(order.axes), "candidates": commands}))
        else:
            _say_cells(order)
        return
    items = load_items(settings.workload)[0]
    rows = [
        {
            "block": segment.block,
            "arm": segment.arm.name,
            "server": segment.arm.url or segment.arm.command,
            "requests": len(segment.items),
            "warm_up": len(segment.warm_up),
            "load": str(segment.load),
        }
        for segment in plan_ab(settings, items)
    ]
    if order.as_json:
        print(json.dumps({"segments": rows}))
    for number, row in enumerate(rows if not order.as_json else ()):
        sizes = f"{row['warm_up']} + {row['requests']} requests, {row['load']}"
        said = f"block {number // len(settings.arms) + 1} {row['arm']}: {sizes}, {row['server']}"
        typer.echo(said, err=True)
    text = announce_unasked(settings)
    if not any(arm.starts_anew for arm in settings.arms):
        try:
            text = announce(settings, probe(settings, items, order.out / "logs"))
        except EndpointError as error:
            text += f" ({error})"
    say(text)


def _say_cells(order: AbOrder) -> None:
    for values in grid.cells_of(order.axes):
        said = announce_unasked(grid.apply(order.settings, values), sized=True)
        say(f"{_named(values)}: {said}")


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _measure(order: AbOrder) -> int:
    settings = order.settings
    if order.page and settings.compared and find_spec("matplotlib") is None:
        typer.echo(
            "no page will be written, for want of matplotlib: "
            f'pip install "foretoken[{EXTRA_OF["matplotlib"]}]" (the verdict does without)',
            err=True,
        )
    if order.axes:
        return _measure_grid(order)
    if not order.resume:  # ask each server once, say how long it will take
        require_new(order.out)
        paces = probe(settings, load_items(settings.workload)[0], order.out / "logs")
        if order.minutes is not None:
            settings = fit_into(settings, paces, 60 * order.minutes)
        say(announce(settings, paces))
        order = replace(order, settings=settings)
    return _measure_two(order) if settings.compared else _measure_one(order)


def _measure_one(order: AbOrder) -> int:
    with _live_view() as watch:
        found = run_ab(order.settings, order.out, resume=order.resume, watch=watch)
    [arm] = found.arms
    print_arms(console(), [arm])
    if order.as_json:
        print(json.dumps(to_plain(found)))
    other = "--candidate" if order.settings.candidate is None else "--baseline"
    say(f"one server was measured; with {other} it is compared with another", "dim")
    return EXIT_NOTHING if arm.num_errors == arm.num_requests else 0


def _measure_two(order: AbOrder) -> int:
    decisions: list[Decision] = []
    with _live_view() as watch:

        def tell(blocks: int, decision: Decision | None) -> None:
            if decisions:
                last = decisions[-1]
                watch.say(f"{last.verdict} after {last.num_blocks} blocks: {last.sentence}")
            decisions.extend([decision] if decision is not None else [])

        most_s = 0.0 if order.fixed else 60 * (order.minutes or MOST_MINUTES)
        summary = run_until_decided(
            order.settings, order.out, order.policy, UntilLimits(most_s=most_s, tell=tell),
            resume=order.resume, watch=watch,
        )  # fmt: skip
    print_ab(console(), summary)
    return _conclude([order.out], order, to_plain(summary))


def _measure_grid(order: AbOrder) -> int:
    _say_cells(order)
    with _live_view() as watch:
        cells = grid.run_grid(
            order.settings, order.axes, order.out, resume=order.resume, watch=watch
        )
    summaries = [cell.summary for cell in cells]
    names = {name: [str(cell.values[name]) for cell in cells] for name in order.axes}
    console().print(cells_table(names, summaries))
    if grid.FORCED in order.axes:
        return _say_break_evens(cells, order)
    folders = [order.out / grid.folder_of(cell.values) for cell in cells]
    return _conclude(folders, order, {"cells": [cell.row() for cell in cells]})


def _say_break_evens(cells: Sequence[grid.Cell], order: AbOrder) -> int:
    """Forced acceptance has no verdict: its texts are garbage."""
    found = grid.break_evens(cells)
    for row in found:
        where = _named(row.values) or row.load
        say(f"{where}: breaks even at a draft acceptance rate of {show_number(row.rate)}")
        for rate, gain in row.points:
            say(f"  at {rate:.2f}: {row.metric} {show_number(gain)}", "dim")
    if order.as_json:
        rows = [cell.row() for cell in cells]
        print(json.dumps({"cells": rows, "break_even": to_plain(found)}))
    return 0 if all(row.points for row in found) else EXIT_NOTHING


def _conclude(runs: Sequence[Path], order: AbOrder, told: Mapping[str, Any]) -> int:
    """Say the verdict on all that was measured, with `told` as JSON; the page is written where
    there is something to draw and something to draw with."""
    found = read_runs(runs, order.policy)
    best = judge_runs(found, order.policy)
    dead = any(arm.num_errors == arm.num_requests for run in found for arm in run.arms)
    if order.page and not dead and find_spec("matplotlib") is not None:
        from foretoken.lab.report.page import write_page

        write_page(order.out / PAGE, found, best, order.policy.name)
        typer.echo(f"{order.out / PAGE}", err=True)
    said: Verdict = best.conclusion
    if order.as_json:
        verdict = {"verdict": said.word, "sentence": ". ".join(best.says),
                   "decision": to_plain(best.best.decision), "exit_code": said.exit_code,
                   "crossings": to_plain(best.crossings)}  # fmt: skip
        print(json.dumps({**told, **verdict}))
    for sentence in best.says if len(best.says) > 1 else ():
        say(f"{sentence}.")
    say(said.sentence, said.style)
    return said.exit_code


class _LiveView:
    """Follows segments and requests: a bar on a terminal, plain lines elsewhere."""

    def __init__(self, show: Console, bar: Progress) -> None:
        self._console, self._bar = show, bar
        self._task = bar.add_task("", visible=False)
        self._errors = 0

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def __call__(self, segment: Segment, record: RequestRecord | None) -> None:
        """A segment begins (None), or one of its requests has ended."""
        where = f"block {segment.block + 1}, {segment.arm.name}"
        if record is not None:
            self._errors += not record.ok
            said = f"{where}, {self._errors} errors" if self._errors else where
            self._bar.update(self._task, advance=1, description=said)
            return
        self._errors = 0
        size = len(segment.items)
        if self._console.is_terminal:
            self._bar.reset(self._task, total=size, description=where, visible=True)
        else:
            self.say(f"{where}: {size} requests, {segment.load}")


@contextmanager
def _live_view() -> Iterator[_LiveView]:
    show = Console(stderr=True, highlight=False)
    with Progress(console=show, transient=True, disable=not show.is_terminal) as bar:
        yield _LiveView(show, bar)
