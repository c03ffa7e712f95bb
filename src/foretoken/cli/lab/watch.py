"""`foretoken lab watch`: a running server, drawn on a terminal, as lines elsewhere."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from foretoken.lab.measure.watch import Alarm, Reading, Targets

_BARS = "".join(chr(0x2581 + n) for n in range(8))
_WIDTH = 60


def watch(
    url: Annotated[str, typer.Argument(help="The server to watch; it needs /metrics.")],
    every: Annotated[float, typer.Option(help="Seconds between readings.", min=0.1)] = 5.0,
    break_even: Annotated[
        float | None, typer.Option(help="Draft acceptance rate to stay above.", min=0, max=1)
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An A/B's folder: its break-even, and TPOT without drafts.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="A page to keep up to date.")] = None,
    ticks: Annotated[int | None, typer.Option(help="Stop after so many readings.", min=1)] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON line per reading to stdout, nothing else.")
    ] = False,
) -> None:
    """Watch a running server's acceptance, load and latencies, and say which rule fires.

    Without a break-even (--baseline, or --break-even) an alarm is an acceptance length below 1.3:
    it bounds the speed-up, whatever drafts cost. Ends after --ticks, or with Ctrl-C. Exit code 0:
    no rule fired; 1: one did; 2: wrong settings; 5: no metrics at the start.
    """
    from foretoken.cli.lab.run_tables import console
    from foretoken.lab.measure.loops import run_to_end
    from foretoken.lab.measure.watch import WatchConfig
    from foretoken.lab.measure.watch import watch as follow

    targets = _targets(baseline, break_even)
    if not as_json:
        console().print(_judged_by(targets, baseline), style="dim", soft_wrap=True)
    config = WatchConfig(url=url, every_s=every, targets=targets, page=page, ticks=ticks)
    fired: dict[str, Alarm] = {}

    def note(readings: "list[Reading]", alarms: "list[Alarm]") -> None:
        fired.update({alarm.rule: alarm for alarm in alarms})
        show(readings, alarms)

    with _write_lines() if as_json else _view(console(), targets) as show:
        try:
            run_to_end(follow(config, note))
        except KeyboardInterrupt:
            pass
    if fired and not as_json:
        console().print("fired: " + ", ".join(fired), style="bold red")
    raise typer.Exit(1 if fired else 0)


def _targets(folder: Path | None, break_even: float | None) -> "Targets":
    """What the server is held against: as given, else what the A/B of `folder` found."""
    from foretoken.lab.analysis.whole_time import break_even_of
    from foretoken.lab.measure.watch import Targets
    from foretoken.lab.records.run_files import read_ab

    if folder is None:
        return Targets(break_even=break_even)
    summary = read_ab(folder, "--baseline")
    tpot, found = summary.arm(summary.baseline).tpot, break_even_of(summary)
    known = found is not None and 0 <= found.estimate <= 1
    return Targets(
        break_even=found.estimate if break_even is None and found and known else break_even,
        tpot_p50_s=tpot.p50.estimate if tpot else None,
        tpot_p99_s=tpot.p99.estimate if tpot else None,
    )


def _judged_by(targets: "Targets", folder: Path | None) -> str:
    if targets.break_even is not None:
        source = f", measured in {folder}" if folder is not None else ""
        return f"break-even: a draft acceptance rate of {targets.break_even:.2f}{source}"
    return (
        "break-even: not known, so only an acceptance length below 1.3 is an alarm; --baseline RUN "
        "takes it from an A/B of this server (`foretoken lab ab`)"
    )


_Show = Callable[[list["Reading"], list["Alarm"]], None]


@contextmanager
def _write_lines() -> Iterator[_Show]:
    from foretoken.lab.plain import to_plain

    def show(readings: "list[Reading]", alarms: "list[Alarm]") -> None:
        line = {**to_plain(readings[-1]), "alarms": to_plain(alarms)}
        print(json.dumps(line), flush=True)

    yield show


@contextmanager
def _view(console: "Console", targets: "Targets") -> Iterator[_Show]:
    """A picture that is drawn over on a terminal; elsewhere a line per reading."""
    from rich.live import Live

    from foretoken.lab.measure.watch import describe

    if console.is_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield lambda readings, alarms: live.update(
                picture(readings, alarms, targets), refresh=True
            )
        return

    def show(readings: "list[Reading]", alarms: "list[Alarm]") -> None:
        told = "  ".join(f"{name} {value}" for name, value in describe(readings[-1]).items())
        console.print(f"{readings[-1].time_s:7.1f} s  {told}", soft_wrap=True)
        for alarm in alarms:
            console.print(f"          {alarm.rule}: {alarm.text}", style="bold red", soft_wrap=True)

    yield show


def picture(
    readings: "list[Reading]", alarms: "list[Alarm]", targets: "Targets"
) -> "RenderableType":
    """What a terminal shows: numbers, the course of acceptance, and the rules that fire."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from foretoken.lab.measure.watch import describe

    table = Table.grid(padding=(0, 2))
    for name, value in describe(readings[-1]).items():
        table.add_row(Text(name, style="dim"), Text(value, style="bold"))
    rates = [reading.rate for reading in readings]
    limit = targets.break_even
    below = limit is not None and rates[-1] < limit
    course = Text(bars(rates), style="red" if below else "green")
    course.append(f"  acceptance, 0 to 1, {len(rates[-_WIDTH:])} readings", style="dim")
    if limit is not None:
        course.append(f"; breaks even at {limit:.2f}", style="dim")
    told = [Text(f"{alarm.rule}: {alarm.text}", style="bold red") for alarm in alarms]
    quiet = [Text("no rule fires", style="green")]
    head = Text(f"{readings[-1].time_s:.0f} s", style="dim")
    return Group(head, table, course, *(told or quiet))


def bars(rates: Sequence[float]) -> str:
    """A character per share, a space where nothing is known."""
    return "".join(
        " " if math.isnan(rate) else _BARS[min(7, max(0, int(8 * rate)))]
        for rate in rates[-_WIDTH:]
    )
