"""Puts runs, verdicts and plots into the page, and writes every file of a report."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from foretoken.lab.decide.evidence import show
from foretoken.lab.decide.verdict import Decision, best_decision, measure_more
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import ArmSummary, Quantiles
from foretoken.lab.records.run_files import make_folder
from foretoken.lab.report.figures import Plot, load_plots, run_plots
from foretoken.lab.report.judged import ReportRun, gains_csv, report_lines, requests_csv, rules_csv


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
    load: float
    decision: Decision
    more: str
    tiles: tuple[Tile, ...]
    plots: tuple[Plot, ...]
    arms: tuple[dict[str, str], ...]
    notes: tuple[str, ...]
    details: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What the page says about itself."""

    version: str
    when: str
    policy: str
    title: str = "Should this server speculate?"


def write_report(folder: Path, runs: Sequence[ReportRun], stamp: Stamp) -> tuple[Path, ...]:
    """Write report.html, plots/*.png, *.csv and report.jsonl; returns the paths.

    Raises:
        ConfigError: `folder` cannot be written to.
    """
    make_folder(folder)
    views = [_view(run) for run in runs]
    over_load = load_plots(runs)
    files: dict[str, str | bytes] = {
        "report.html": _page(views, over_load, stamp),
        "gains.csv": gains_csv(runs),
        "rules.csv": rules_csv(runs),
        "report.jsonl": report_lines(runs),
    }
    if any(run.requests for run in runs):
        files["requests.csv"] = requests_csv(runs)
    for plot in (*over_load, *(plot for view in views for plot in view.plots)):
        files[f"plots/{plot.name}.png"] = plot.png
    written = []
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        written.append(path)
    return tuple(written)


def _page(views: list[_RunView], over_load: tuple[Plot, ...], stamp: Stamp) -> str:
    overall = best_decision([view.decision for view in views])
    own = next(view for view in views if view.decision is overall.best)
    ordered = [own, *(view for view in views if view is not own)]
    text = resources.files("foretoken.lab.report").joinpath("page.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(text).render(
        best=own,
        sentence=overall.sentence,
        runs=ordered,
        load_plots=over_load,
        title=stamp.title,
        subtitle=_subtitle(own),
        version=stamp.version,
        when=stamp.when,
        policy=stamp.policy,
    )


def _subtitle(view: _RunView) -> str:
    names = " against ".join(arm["name"] for arm in reversed(view.arms))
    return f"{names}, {view.decision.num_blocks} blocks, look {view.decision.look}"


def _view(run: ReportRun) -> _RunView:
    summary = run.summary
    decision = run.decision
    details = {"config": summary.config, "environment": summary.environment,
               "servers": [to_plain(arm.server) for arm in summary.arms]}  # fmt: skip
    return _RunView(
        name=run.name,
        load=run.load,
        decision=decision,
        more=measure_more(decision) if decision.needed_blocks is not None else "",
        tiles=_tiles(run),
        plots=run_plots(run),
        arms=tuple(_arm(arm) for arm in summary.arms),
        notes=(*summary.notes, *(note for arm in summary.arms for note in arm.notes)),
        details=json.dumps(to_plain(details), indent=2),
    )


def _tiles(run: ReportRun) -> tuple[Tile, ...]:
    """Speed-up, tail, acceptance length, break-even, throughput, equality."""
    found = [_gain_tile(run, "tpot_p50", "speed-up (TPOT P50)"),
             _gain_tile(run, "tpot_p99", "TPOT P99")]  # fmt: skip
    bucket = run.summary.arm(run.summary.candidate).all_drafts
    length = bucket.length if bucket else None
    found.append(
        Tile(
            label="acceptance length",
            value=f"{length.estimate:.2f}" if length else "unknown",
            detail=f"rate {bucket.rate.estimate:.0%}" if bucket else "",
        )
    )
    limit = run.decision.break_even_rate
    found.append(
        Tile(
            label="breaks even at a rate of",
            value=f"{max(0.0, limit):.0%}" if limit is not None else "unknown",
            detail="of drafted tokens accepted, at this load",
        )
    )
    found.append(_gain_tile(run, "ttft_p99", "TTFT P99"))
    equality = run.summary.equality
    found.append(
        Tile(
            label="equal answers",
            value=f"{equality.num_equal}/{equality.num_compared}" if equality else "not compared",
            detail="greedy and seeded requests",
        )
    )
    return tuple(found)


def _gain_tile(run: ReportRun, metric: str, name: str) -> Tile:
    gain = run.summary.gain(metric)
    if gain is None:
        return Tile(label=name, value="unknown", detail="")
    value, _, interval = show(gain.ratio).partition(" ")
    return Tile(label=name, value=value, detail=interval)


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
