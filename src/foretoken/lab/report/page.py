"""The page of `lab decide --html`: verdict, numbers, plots, every rule, how it was measured."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2

import foretoken
from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, break_even_of, draft_share_of
from foretoken.lab.decide.evidence import requests_to_support, show_break_even, show_part
from foretoken.lab.decide.overall import Overall
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import Quantiles
from foretoken.lab.report.canvas import variables
from foretoken.lab.report.plots import draw_plots
from foretoken.lab.report.runs import ReportRun, write_text
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.verdict import LEAVE_IT_OFF, USE_IT


class Tile(NamedTuple):
    """A number at the top of the page."""

    label: str
    value: str
    detail: str


def write_page(file: Path, runs: Sequence[ReportRun], overall: Overall, policy: str) -> None:
    """Write one self-contained page; `policy` is the name of that which judged. Raises ConfigError:
    `file` cannot be written."""
    best = next(run for run in runs if run.decision is overall.best)
    template = resources.files("foretoken.lab.report").joinpath("page.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(template).render(
        best=best,
        overall=overall,
        runs=runs,
        tones={USE_IT: "good", LEAVE_IT_OFF: "stop"},
        tiles=tiles,
        milliseconds=_milliseconds,
        details=_details,
        plots=draw_plots(runs, overall),
        version=foretoken.__version__,
        when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        policy=policy,
        light=variables(dark=False),
        dark=variables(dark=True),
    )
    write_text(file, page, "--html")


def _details(run: ReportRun) -> str:
    summary = run.summary
    details = {"config": summary.config, "environment": summary.environment,
               "servers": [arm.server for arm in summary.arms]}  # fmt: skip
    return json.dumps(to_plain(details), indent=2)


def tiles(run: ReportRun) -> list[Tile]:
    found = [_gain_tile(run, "tpot_p50", "speed-up (TPOT P50)"),
             _gain_tile(run, "tpot_p99", "TPOT P99"),
             _gain_tile(run, "ttft_p50", "TTFT P50"), *_acceptance_tiles(run)]  # fmt: skip
    same = run.summary.equality
    if same is not None and same.num_compared:
        value = f"{same.num_equal:,} of {same.num_compared:,}"
        found.append(Tile("equal answers", value, "greedy and seeded requests"))
    return found


def _gain_tile(run: ReportRun, metric: str, name: str) -> Tile:
    gain = run.summary.gain(metric)
    if gain is None:
        return Tile(name, "unknown", "not measured")
    value = f"{gain.ratio.estimate:.2f}x"
    if not gain.enough:
        needed = requests_to_support(gain)
        few = f"too few to tell: {gain.num_pairs:,} of {needed:,} requests an arm"
        return Tile(name, f"{value}?", few)
    counted = f"{gain.num_pairs:,} requests an arm, {gain.num_blocks} starts"
    return Tile(name, value, f"{_ends(gain.ratio)}; {counted}")


def _acceptance_tiles(run: ReportRun) -> list[Tile]:
    """Rate against break-even, with the share of steps that draft, and length."""
    bucket = run.drafts
    limit, share = break_even_of(run.summary), draft_share_of(run.summary)
    if bucket is None:
        return [Tile("acceptance rate", "none", NOTHING_DRAFTED)] if share == 0.0 else []
    detail = _ends(bucket.rate, 100, "%")
    detail += f", {show_break_even(limit)}" if limit is not None else ""
    detail += f"; {show_part(share)} of steps draft" if share is not None else ""
    detail += f"; {bucket.num_drafted:,} drafted tokens of {bucket.num_requests:,} requests"
    found = [Tile("acceptance rate", f"{bucket.rate.estimate:.0%}", detail)]
    if bucket.length is not None:
        steps = f"{_ends(bucket.length)}; {bucket.num_steps or 0:,} verifications"
        found.append(Tile("acceptance length", f"{bucket.length.estimate:.2f}", steps))
    return found


def _ends(interval: Interval, factor: float = 1, unit: str = "") -> str:
    if not interval.known:
        return "interval unknown"
    digits = 0 if unit else 2
    low, high = (f"{factor * end:.{digits}f}{unit}" for end in (interval.low, interval.high))
    return f"[{low}, {high}]"


def _milliseconds(found: Quantiles | None) -> str:
    if found is None:
        return ""
    return f"{1e3 * found.p50.estimate:.1f} / {1e3 * found.p99.estimate:.1f} ms"
