"""The page of `lab decide --html`: verdict, numbers, plots, every rule, how it was measured.

Each plot says what it shows and from how many; one without data is left out. Several runs are drawn
along the first number in their traffic that differs, those only that are alike in everything else
to the run that decides; where what differs is no number, the gain of every run is a row.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import jinja2
import numpy as np
from matplotlib.figure import Figure

import foretoken
from foretoken.lab.analysis.dimensions import Dimension, show_value, spans_widely
from foretoken.lab.analysis.whole_time import NOTHING_DRAFTED, break_even_of, draft_share_of
from foretoken.lab.decide.overall import JudgedRun, Overall
from foretoken.lab.decide.rules import requests_to_support, show_break_even, show_part
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import AcceptanceBucket, Quantiles
from foretoken.lab.records.run_files import write_text
from foretoken.lab.report import canvas
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.verdict import LEAVE_IT_OFF, USE_IT, WORTH_IT
from foretoken.types.accepted import accepted_by_position


class Tile(NamedTuple):
    label: str
    value: str
    detail: str


def write_page(file: Path, runs: Sequence[JudgedRun], overall: Overall, policy: str) -> None:
    """Write one self-contained page; `policy` is the name of that which judged. Raises ConfigError:
    `file` cannot be written."""
    template = resources.files("foretoken.lab.report").joinpath("page.html").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(template).render(
        best=overall.best,
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
        light=canvas.variables(dark=False),
        dark=canvas.variables(dark=True),
    )
    write_text(file, page, "--html")


def _details(run: JudgedRun) -> str:
    summary = run.summary
    details = {"config": summary.config, "environment": summary.environment,
               "servers": [arm.server for arm in summary.arms]}  # fmt: skip
    return json.dumps(to_plain(details), indent=2)


def tiles(run: JudgedRun) -> list[Tile]:
    found = [_gain_tile(run, "tpot_p50", "speed-up (TPOT P50)"),
             _gain_tile(run, "tpot_p99", "TPOT P99"),
             _gain_tile(run, "ttft_p50", "TTFT P50"), *_acceptance_tiles(run)]  # fmt: skip
    same = run.summary.equality
    if same is not None and same.num_compared:
        value = f"{same.num_equal:,} of {same.num_compared:,}"
        found.append(Tile("equal answers", value, "greedy and seeded requests"))
    return found


def _gain_tile(run: JudgedRun, metric: str, name: str) -> Tile:
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


def _acceptance_tiles(run: JudgedRun) -> list[Tile]:
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


class Plot(NamedTuple):
    title: str
    says: str
    """What is to be seen, and n."""
    svg: str


def latencies(run: JudgedRun) -> Figure | None:
    arms = run.arms
    rows = [
        (f"{name} {quantile.upper()}", [getattr(getattr(arm, key), quantile) for arm in arms])
        for key, name in (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2e", "whole answer"))
        if all(getattr(arm, key) is not None for arm in arms)
        for quantile in ("p50", "p95", "p99")
    ]
    if not rows:
        return None
    figure, axes = canvas.new_figure(0.9 + 0.31 * len(rows))
    for row, (_, (before, after)) in enumerate(reversed(rows)):
        colour = canvas.GOOD if after.estimate <= before.estimate else canvas.BAD
        ends = [1e3 * before.estimate, 1e3 * after.estimate]
        axes.plot(ends, [row, row], color=colour, linewidth=3, alpha=0.5)
        for value, own in ((before, canvas.BASELINE), (after, canvas.CANDIDATE)):
            if value.known:
                axes.plot([1e3 * value.low, 1e3 * value.high], [row, row], color=own,
                          linewidth=7, alpha=0.25, solid_capstyle="butt")  # fmt: skip
            axes.plot(1e3 * value.estimate, row, "o", color=own, markersize=6,
                      mfc=own if value.known else "none")  # fmt: skip
        said = " to ".join(f"{x:.3g} ms" if x < 1e3 else f"{x / 1e3:.3g} s" for x in ends)
        axes.annotate(said, (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      annotation_clip=False)  # fmt: skip
    canvas.plain_log(axes.xaxis, subs=(1,))
    canvas.name_rows(axes, [name for name, _ in rows])
    axes.set_xlabel("ms (grey: without, blue: with speculation)")
    return figure


def by_position(run: JudgedRun) -> Figure | None:
    """Share of verifications that accepted position i, and the same given all before it were. Entry
    j of a histogram counts the steps that accepted j drafts."""
    steps_j = run.drafts.histogram if run.drafts else ()
    if len(steps_j) < 2 or not sum(steps_j):
        return None
    shares = np.array(accepted_by_position(steps_j, steps_j, of_all=True))
    before = np.array([1.0, *shares[:-1]])
    given = np.divide(shares, before, out=np.zeros_like(shares), where=before > 0)
    figure, axes = canvas.new_figure(3.0)
    positions = np.arange(1, len(steps_j))
    axes.bar(positions, 100 * shares, color=canvas.CANDIDATE, width=0.62, label="accepted")
    label = "given all before were"
    axes.plot(positions, 100 * given, "o-", color=canvas.WARN, markersize=5, label=label)
    axes.set_xticks(positions)
    axes.set_ylim(0, 105)
    axes.set_xlabel("draft position")
    axes.set_ylabel("verifications, %")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right")
    return figure


def class_gains(run: JudgedRun) -> Figure | None:
    """Gain of TPOT P50 and P99 per class; hollow where a P99 has too few requests."""
    short = {"temperature": "T = ", "category": "", "context": "prompt "}
    rows = []
    for own in run.summary.classes:
        for gain in (own.gain("tpot_p50"), own.gain("tpot_p99")):
            if gain is None or not np.isfinite(gain.ratio.estimate):
                continue
            of = "" if gain.enough else f" of {requests_to_support(gain):,}"
            name = f"{short.get(own.by, '')}{own.value} {gain.metric[-3:].upper()}"
            rows.append((f"{name}, n={gain.num_pairs:,}{of}", gain))
    if not rows:
        return None
    return canvas.gain_rows(rows, "gain of TPOT, 95 % interval (hollow: too few)")


def rates(run: JudgedRun) -> Figure | None:
    """Acceptance per class with P10 to P90 over requests, against the rate that breaks even."""
    arm = run.arms[1]
    found = [b for by in ("all", "temperature", "category", "output_tokens")
             for b in arm.buckets(by) if b.num_drafted]  # fmt: skip
    if not found:
        return None
    figure, axes = canvas.new_figure(0.9 + 0.34 * len(found))
    for row, bucket in enumerate(reversed(found)):
        ends = [100 * bucket.p10.estimate, 100 * bucket.p90.estimate]
        if np.isfinite(ends).all():
            axes.plot(ends, [row, row], color=canvas.CANDIDATE, linewidth=5, alpha=0.25,
                      solid_capstyle="round")  # fmt: skip
        axes.plot(100 * bucket.rate.estimate, row, "o", color=canvas.CANDIDATE)
        if np.isfinite(bucket.raw_p10):
            axes.plot(100 * bucket.raw_p10, row, "|", color=canvas.FAINT, markersize=9)
    limit = run.decision.break_even_rate
    if limit is not None and 0 <= limit <= 1:
        canvas.limit_lines(axes, ((100 * limit, canvas.BAD, "breaks even"),))
    canvas.name_rows(axes, [f"{_label(b)}, n={b.num_requests}" for b in found])
    axes.set_xlim(0, 100)
    axes.set_xlabel("acceptance rate, %")
    return figure


def _label(bucket: AcceptanceBucket) -> str:
    if bucket.by == "temperature":
        return f"T {bucket.value}" if bucket.value[0] in "<>" else f"T = {bucket.value}"
    if bucket.by == "output_tokens":
        return f"{bucket.value} tokens out"
    return "all requests" if bucket.by == "all" else bucket.value or bucket.by


def _axis(runs: Sequence[JudgedRun], overall: Overall) -> tuple[Dimension, list[int]] | None:
    """The number to draw along, and the runs in its order; None if there is none with two runs."""
    decides = runs.index(overall.best)
    for dimension in (d for d in overall.dimensions if d.is_traffic and d.is_number):
        rest = [d for d in overall.dimensions if d is not dimension]
        own = [i for i in range(len(runs)) if all(d.values[i] == d.values[decides] for d in rest)]
        if len({dimension.values[i] for i in own}) > 1:
            return dimension, sorted(own, key=lambda i: float(dimension.values[i]))
    return None


def gain_along(
    runs: Sequence[JudgedRun], overall: Overall, dimension: Dimension, order: Sequence[int]
) -> Figure | None:
    """The gain of TPOT P50 with its interval and requests, and where it passes the limits."""
    seen = ((float(dimension.values[i]), runs[i].summary.gain("tpot_p50")) for i in order)
    points = [(x, gain) for x, gain in seen if gain is not None]
    if len(points) < 2:
        return None
    figure, axes = canvas.new_figure()
    values = [x for x, _ in points]
    axes.plot(values, [gain.ratio.estimate for _, gain in points], "o-", color=canvas.CANDIDATE)
    low, high = np.array([(gain.ratio.low, gain.ratio.high) for _, gain in points]).T
    if np.isfinite([low, high]).all():
        axes.fill_between(values, low, high, color=canvas.CANDIDATE, alpha=0.14, linewidth=0)
    for x, gain in points:
        axes.annotate(f"n={gain.num_pairs}", (x, gain.ratio.estimate), xytext=(0, -15),
                      textcoords="offset points", fontsize=8, color=canvas.FAINT,
                      ha="center")  # fmt: skip
    for limit, colour in ((1.0, canvas.BAD), (WORTH_IT, canvas.GOOD)):
        axes.axhline(limit, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
    for found in overall.crossings:
        if found.dimension != dimension.name or not values[0] <= found.at.estimate <= values[-1]:
            continue
        colour = canvas.BAD if found.limit == 1.0 else canvas.GOOD
        ends = np.clip([found.at.low, found.at.high], values[0], values[-1])
        axes.plot(ends, [found.limit] * 2, color=colour, linewidth=5, alpha=0.35,
                  solid_capstyle="round")  # fmt: skip
        axes.plot(found.at.estimate, found.limit, "D", color=colour, markersize=7)
        axes.annotate(f"{found.limit:.1f}x at {found.at.estimate:.3g}",
                      (found.at.estimate, found.limit), xytext=(8, 7),
                      textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
    axes.set_ylabel("gain of TPOT P50")
    axes.set_xlabel(dimension.name)
    if spans_widely(values[0], values[-1]):
        canvas.plain_log(axes.xaxis)
    axes.set_xticks(values, [show_value(value) for value in values])
    axes.margins(y=0.15)
    return figure


def gain_by_run(runs: Sequence[JudgedRun], overall: Overall) -> Figure | None:
    named = overall.dimensions[:3]
    rows = [
        (", ".join(f"{d.name} {d.show(index)}" for d in named) or f"run {index + 1}", gain)
        for index, run in enumerate(runs)
        if (gain := run.summary.gain("tpot_p50")) is not None
    ]
    return canvas.gain_rows(rows, "gain of TPOT P50 with 95 % interval") if len(rows) > 1 else None


def draw_plots(runs: Sequence[JudgedRun], overall: Overall) -> list[Plot]:
    """The plots for which there is data, those of one run about the run that decides."""
    best, axis = overall.best, _axis(runs, overall)
    gain, bucket = best.summary.gain("tpot_p50"), best.drafts
    requests = f"n = {best.arms[1].num_requests:,} requests."
    if gain is not None:
        starts = f"{gain.num_blocks} starts of each server"
        requests = f"n = {gain.num_pairs:,} requests an arm, {starts}."
    drafts = ""
    if bucket is not None:
        steps = f"{bucket.num_steps:,} verifications" if bucket.num_steps else ""
        counted = steps or f"{bucket.num_drafted:,} drafted tokens"
        drafts = f"n = {counted} of {bucket.num_requests:,} requests."
    along = "Green excludes 1, red is a loss, orange is open."
    if axis is not None:
        along = f"Diamonds and their bars: where it passes {WORTH_IT} and 1, with its interval."
    with canvas.house_style():
        drawn = (
            ("latency", "Latency", latencies(best),
             f"Bands: 95 % intervals; hollow: too few for one. {requests}"),
            ("position", "Acceptance by position", by_position(best),
             f"Bars fall by nature; the line tells whether later guesses are worse. {drafts}"),
            ("gain", f"Gain by {axis[0].name if axis else 'run'}",
             gain_along(runs, overall, *axis) if axis else gain_by_run(runs, overall), along),
            ("classes", "Gain by class", class_gains(best),
             f"Requests of one class against the same without speculation. {requests}"),
            ("acceptance", "Acceptance by class", rates(best),
             "Circle: share of drafted tokens that were accepted. Line: P10 to P90 of requests, "
             f"noise taken out; tick: P10 with it. {drafts}"),
        )  # fmt: skip
        return [
            Plot(title, says, canvas.as_svg(figure, name))
            for name, title, figure, says in drawn
            if figure is not None
        ]
