"""Puts runs, verdicts and plots into the page, and writes every file of a report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, break_even_of, draft_share_of
from foretoken.lab.decide.evidence import (
    requests_to_support,
    show_break_even,
    show_part,
)
from foretoken.lab.decide.overall import Overall, judge_runs
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.decide.verdict import Decision, measure_more
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import ArmSummary, Quantiles
from foretoken.lab.records.run_files import make_folder
from foretoken.lab.report.canvas import variables
from foretoken.lab.report.figures import Plot, first_screen, plots_together, run_plots
from foretoken.lab.report.judged import ReportRun, gains_csv, report_lines, requests_csv, rules_csv
from foretoken.lab.stats.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A number at the top of the page."""

    label: str
    value: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunView:
    """What the page shows of one run."""

    name: str
    places: tuple[str, ...]
    """What differs between the runs, here."""
    decision: Decision
    more: str
    tiles: tuple[Tile, ...]
    plots: tuple[Plot, ...]
    """Of the run that decides; a report of another run alone has that one's."""
    arms: tuple[dict[str, str], ...]
    notes: tuple[str, ...]
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What the page says about itself."""

    version: str
    when: str
    title: str = "Should this server speculate?"


def write_report(
    folder: Path, runs: Sequence[ReportRun], policy: ShipPolicy, stamp: Stamp
) -> tuple[Path, ...]:
    """Write report.html, plots/*.png, *.csv and report.jsonl; returns the paths.

    Raises:
        ConfigError: `folder` cannot be written to.
    """
    make_folder(folder)
    overall = judge_runs([(run.summary, run.decision) for run in runs], policy)
    views = [_view(run, overall, index) for index, run in enumerate(runs)]
    together = plots_together(runs, overall)
    files: dict[str, str | bytes] = {
        "report.html": _page(views, overall, together, policy.name, stamp),
        "gains.csv": gains_csv(runs),
        "rules.csv": rules_csv(runs),
        "report.jsonl": report_lines(runs),
    }
    if any(run.requests for run in runs):
        files["requests.csv"] = requests_csv(runs)
    for plot in (*together, *(plot for view in views for plot in view.plots)):
        files[f"plots/{plot.name}.png"] = plot.png
    written = []
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        written.append(path)
    return tuple(written)


def _page(
    views: list[_RunView], overall: Overall, together: tuple[Plot, ...], policy: str, stamp: Stamp
) -> str:
    own = next(view for view in views if view.decision is overall.best)
    first = first_screen(own.plots, together, own.name)
    shown = {plot.name for plot in first}
    text = resources.files("foretoken.lab.report").joinpath("page.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text).render(
        best=own,
        overall=overall,
        runs=views,
        place=_place(own, overall),
        first=first,
        shown=shown,
        together=[plot for plot in together if plot.name not in shown],
        title=stamp.title,
        subtitle=_subtitle(own),
        version=stamp.version,
        when=stamp.when,
        policy=policy,
        light=variables(dark=False),
        dark=variables(dark=True),
    )


def _place(view: _RunView, overall: Overall) -> str:
    """Where the run was measured, in a few words."""
    return ", ".join(
        f"{dimension.name} {value}"
        for dimension, value in zip(overall.dimensions, view.places, strict=True)
    )


def _subtitle(view: _RunView) -> str:
    names = " against ".join(arm["name"] for arm in reversed(view.arms))
    return f"{names}, {view.decision.num_blocks} blocks, look {view.decision.look}"


def _view(run: ReportRun, overall: Overall, index: int) -> _RunView:
    summary = run.summary
    decision = run.decision
    decides = decision is overall.best
    details = {"config": summary.config, "environment": summary.environment,
               "servers": [to_plain(arm.server) for arm in summary.arms]}  # fmt: skip
    return _RunView(
        name=run.name,
        places=tuple(d.show(index) for d in overall.dimensions),
        decision=decision,
        more=measure_more(decision) if decision.needed_blocks is not None else "",
        tiles=_tiles(run),
        plots=run_plots(run) if decides else (),
        arms=tuple(_arm(arm) for arm in summary.arms),
        notes=(*summary.notes, *(note for arm in summary.arms for note in arm.notes)),
        details=json.dumps(to_plain(details), indent=2),
    )


def _tiles(run: ReportRun) -> tuple[Tile, ...]:
    """Speed-up, tail, first token, acceptance, break-even, equality; each with its n."""
    found = [_gain_tile(run, "tpot_p50", "speed-up (TPOT P50)"),
             _gain_tile(run, "tpot_p99", "TPOT P99"),
             _gain_tile(run, "ttft_p50", "TTFT P50")]  # fmt: skip
    found += _acceptance_tiles(run)
    equality = run.summary.equality
    if equality is not None and equality.num_compared:
        value = f"{equality.num_equal:,} of {equality.num_compared:,}"
        found.append(Tile(label="equal answers", value=value, detail="greedy and seeded requests"))
    return tuple(found)


def _acceptance_tiles(run: ReportRun) -> list[Tile]:
    """Rate against break-even, with the share of steps that draft, and length."""
    bucket = run.summary.arm(run.summary.candidate).all_drafts
    limit, share = break_even_of(run.summary), draft_share_of(run.summary)
    if bucket is None:
        none = Tile(label="acceptance rate", value="none", detail=NOTHING_DRAFTED)
        return [none] if share == 0.0 else []
    counted = f"{bucket.num_drafted:,} drafted tokens of {bucket.num_requests:,} requests"
    even = f", {show_break_even(limit)}" if limit is not None else ""
    where = f"; {show_part(share)} of steps draft" if share is not None else ""
    rate = Tile(
        label="acceptance rate",
        value=f"{bucket.rate.estimate:.0%}",
        detail=f"{_ends(bucket.rate, 100, '%')}{even}{where}; {counted}",
    )
    if bucket.length is None:
        return [rate]
    length = Tile(
        label="acceptance length",
        value=f"{bucket.length.estimate:.2f}",
        detail=f"{_ends(bucket.length)}; {bucket.num_steps or 0:,} verifications",
    )
    return [rate, length]


def _ends(interval: Interval, factor: float = 1, unit: str = "") -> str:
    if not interval.known:
        return "interval unknown"
    digits = 0 if unit else 2
    low, high = (f"{factor * end:.{digits}f}{unit}" for end in (interval.low, interval.high))
    return f"[{low}, {high}]"


def _gain_tile(run: ReportRun, metric: str, name: str) -> Tile:
    gain = run.summary.gain(metric)
    if gain is None:
        return Tile(label=name, value="unknown", detail="not measured")
    counted = f"{gain.num_pairs:,} requests an arm, {gain.num_blocks} starts"
    if not gain.enough:
        needed = requests_to_support(gain)
        few = f"too few to tell: {gain.num_pairs:,} of {needed:,} requests an arm"
        return Tile(label=name, value=f"{gain.ratio.estimate:.2f}x?", detail=few)
    return Tile(
        label=name,
        value=f"{gain.ratio.estimate:.2f}x",
        detail=f"{_ends(gain.ratio)}; {counted}",
    )


def _arm(arm: ArmSummary) -> dict[str, str]:
    server = " ".join(filter(None, (arm.server.engine, arm.server.version, arm.server.model)))
    return {
        "name": arm.arm,
        "server": f"{server} at {arm.server.url}",
        "command": arm.server.command or "",
        "requests": f"{arm.num_requests:,}",
        "errors": f"{arm.num_errors:,}",
        "tokens": f"{arm.tokens_per_s.estimate:,.1f}",
        "tpot": _milliseconds(arm.tpot),
        "ttft": _milliseconds(arm.ttft),
    }


def _milliseconds(found: Quantiles | None) -> str:
    if found is None:
        return ""
    return f"{1e3 * found.p50.estimate:.1f} / {1e3 * found.p99.estimate:.1f} ms"
