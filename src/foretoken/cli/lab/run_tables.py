"""Tables of runs and comparisons for people; numbers come from the summaries as they are."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from foretoken.lab.analysis.summary import enough_drafts
from foretoken.lab.analysis.whole_time import break_even_of, draft_share_of
from foretoken.lab.decide.rules import requests_to_support, show_part
from foretoken.lab.records.results import AbSummary, ArmGain, ArmSummary, Quantiles
from foretoken.lab.stats.intervals import Interval


def console() -> Console:
    """Where people read: stderr, so that stdout is for machines."""
    return Console(stderr=True, highlight=False, width=None if sys.stderr.isatty() else 110)


def say(text: str, style: str = "") -> None:
    """One line there, however long, as it is."""
    console().print(text, style=style, soft_wrap=True, markup=False)


def _show(value: Interval | None, form: str, unit: str = "", scale: float = 1.0) -> str:
    if value is None or math.isnan(value.estimate):
        return "-"
    said = f"{scale * value.estimate:{form}}{unit}"
    if not value.known:
        return said
    return f"{said} ({scale * value.low:{form}}-{scale * value.high:{form}})"


def show_number(value: Interval | None, digits: int = 2) -> str:
    return _show(value, f".{digits}f")


def show_percent(value: Interval | None) -> str:
    return _show(value, ".0%")


def _milliseconds(found: Quantiles | None, name: str) -> str:
    return _show(None if found is None else getattr(found, name), ".1f", " ms", 1000.0)


def print_arms(out: Console, arms: Sequence[ArmSummary]) -> None:
    table = Table("", *(arm.arm for arm in arms), title_justify="left")
    rows: dict[str, Callable[[ArmSummary], str]] = {
        "requests": lambda a: f"{a.num_requests} ({a.num_errors} failed)",
        "tokens/s": lambda a: show_number(a.tokens_per_s, 1),
        "TTFT P50": lambda a: _milliseconds(a.ttft, "p50"),
        "TTFT P99": lambda a: _milliseconds(a.ttft, "p99"),
        "TPOT P50": lambda a: _milliseconds(a.tpot, "p50"),
        "TPOT P99": lambda a: _milliseconds(a.tpot, "p99"),
        "end to end P50": lambda a: _milliseconds(a.e2e, "p50"),
        "within SLO": lambda a: show_number(a.attained),
    }
    for name, show in rows.items():
        table.add_row(name, *(show(arm) for arm in arms))
    out.print(table)
    for arm in arms:
        if arm.acceptance:
            title = f"acceptance of {arm.arm}"
            table = Table(title, "requests", "rate", "length", "P10", "P90")
            for bucket in arm.acceptance:
                name = "all" if bucket.by == "all" else f"{bucket.by} {bucket.value}"
                name += "" if bucket.exact else " (inferred)"
                numbers = (bucket.rate, bucket.length, bucket.p10, bucket.p90)
                table.add_row(name, str(bucket.num_requests), *map(show_number, numbers))
            out.print(table)
        notes = list(arm.notes)
        if arm.errors:
            notes.append("failed: " + ", ".join(f"{n} {kind}" for kind, n in arm.errors.items()))
        if not arm.steady:
            notes.append("not steady: latencies drift through the blocks; the load may be too high")
        ttft = arm.ttft.p50.estimate if arm.ttft else 0.0
        if arm.client_lag_p99_s > max(0.002, 0.1 * ttft):
            notes.append(f"the client was late by {1000 * arm.client_lag_p99_s:.1f} ms at P99")
        for note in notes:
            out.print(f"{arm.arm}: {note}", style="yellow", soft_wrap=True)


def print_ab(out: Console, summary: AbSummary) -> None:
    print_arms(out, summary.arms)
    table = Table("gain (above 1: better)", summary.candidate, "blocks")
    for gain in summary.gains:
        ratio = show_number(gain.ratio) if gain.enough else f"{show_number(gain.ratio)} (too few)"
        table.add_row(gain.metric, ratio, str(gain.num_blocks))
    out.print(table)
    if summary.equality is not None and summary.equality.num_compared:
        same = summary.equality
        out.print(f"identical texts: {same.num_equal} of {same.num_compared}")
    print_classes(out, summary)
    for note in summary.notes:
        out.print(note, style="yellow", soft_wrap=True)


def print_classes(out: Console, summary: AbSummary) -> None:
    if not summary.classes:
        return
    table = Table("by class, in this mix", "requests an arm", "TPOT P50", "TPOT P95", "TPOT P99",
                  "TTFT P50")  # fmt: skip
    for own in summary.classes:
        gains = (own.gain(name) for name in ("tpot_p50", "tpot_p95", "tpot_p99", "ttft_p50"))
        table.add_row(own.name, str(own.num_pairs), *(show_gain(gain) for gain in gains))
    out.print(table)
    said = "0.84? (72 of 1,000): too few requests to tell; 1,000 of them would be enough"
    out.print(said, style="dim")


def show_gain(gain: ArmGain | None) -> str:
    """A gain with its interval, or a `?` with its requests of those that it would take to tell."""
    if gain is None:
        return "-"
    if gain.enough and gain.ratio.known:
        return show_number(gain.ratio)
    if gain.num_pairs == 0:
        return "-"
    needed = requests_to_support(gain)
    return f"{gain.ratio.estimate:.2f}? ({gain.num_pairs:,} of {needed:,})"


def cells_table(
    places: Mapping[str, Sequence[str]],
    summaries: Sequence[AbSummary],
    verdicts: Sequence[str] = (),
) -> Table:
    """A row per A/B: where it was measured, and what it found with how many requests."""
    table = Table(*places, *(("verdict",) if verdicts else ()), "requests / blocks",
                  "acceptance", "breaks even at", "TPOT P50 gain", "TPOT P99 gain")  # fmt: skip
    for row, summary in enumerate(summaries):
        arm, middle = summary.arm(summary.candidate), summary.gain("tpot_p50")
        few = " (few)" if arm.all_drafts and not enough_drafts(arm) else ""
        size = f"{middle.num_pairs} / {middle.num_blocks}" if middle else str(arm.num_requests)
        rate = arm.all_drafts.rate if arm.all_drafts else None
        limit, share = break_even_of(summary), draft_share_of(summary)
        pays_at = show_percent(limit)
        if limit is not None and limit.estimate > 1:
            pays_at = f"no rate would pay ({limit.estimate:.0%})"
        pays_at += "" if share is None else f", {show_part(share)} of steps draft"
        table.add_row(
            *(values[row] for values in places.values()), *verdicts[row : row + 1],
            size, show_percent(rate) + few, pays_at, show_gain(middle),
            show_gain(summary.gain("tpot_p99")),
        )  # fmt: skip
    return table
