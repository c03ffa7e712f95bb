"""Summaries as rich tables and as JSON. Knows how they look, not how they were measured."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.table import Table

from foretoken.cli.timed_runs import ComparedArm, Estimate


def comparison_table(summaries: Sequence[ComparedArm], title: str, baseline: str) -> Table:
    """One row per workload and arm."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("workload", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for name in ("tokens/s", "speed-up", "acceptance\nlength"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("accepted by\nposition, %", min_width=14)
    table.add_column("same\ntokens", justify="center", no_wrap=True)
    shown = ""
    for summary in summaries:
        if shown and summary.workload != shown:
            table.add_section()
        table.add_row(*_cells(summary, baseline, first=summary.workload != shown))
        shown = summary.workload
    return table


def _cells(summary: ComparedArm, baseline: str, *, first: bool) -> tuple[str, ...]:
    is_baseline = summary.arm == baseline
    same = "[green]yes[/]" if summary.identical else "[bold red]NO[/]"
    by_position = " ".join(f"{share:.0%}"[:-1] for share in summary.acceptance_by_position)
    return (
        summary.workload if first else "",
        summary.arm,
        f"{summary.tokens_per_s:.0f}",
        "1" if is_baseline else f"[bold]{summary.speedup.median:.2f}x[/]",
        "" if is_baseline else f"{summary.acceptance_length:.2f}",
        by_position,
        same,
    )


def show_milliseconds(value: Estimate) -> str:
    """`12.3 ms [11.9, 12.8]`, from 100 ms on without decimals."""
    digits = 1 if value.median < 0.1 else 0
    median, low, high = (f"{1e3 * x:.{digits}f}" for x in (value.median, value.low, value.high))
    return f"{median} ms [{low}, {high}]"


def show_ratio(value: Estimate) -> str:
    """`1.62x [1.55, 1.70]`."""
    return f"{value.median:.2f}x [{value.low:.2f}, {value.high:.2f}]"


def as_records(summaries: Sequence[ComparedArm]) -> list[dict[str, Any]]:
    """The summaries as plain data for JSON."""
    return [asdict(summary) for summary in summaries]
