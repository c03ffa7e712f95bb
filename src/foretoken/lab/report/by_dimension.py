"""Plots over several A/Bs: the gain, latency, goodput and the frontier along what differs.

Runs are drawn along the first number in their traffic that differs (load, temperature, length of
prompt), those only that are alike in everything else to the run that decides. Where what differs
is no number, the gain of every run is a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.analysis.crossover import spans_widely
from foretoken.lab.analysis.dimensions import Dimension, show_value
from foretoken.lab.decide.overall import Overall
from foretoken.lab.records.results import ArmSummary, Quantiles
from foretoken.lab.report.canvas import (
    BAD,
    BASELINE,
    CANDIDATE,
    FAINT,
    GOOD,
    gain_rows,
    new_figure,
    plain_log,
)
from foretoken.lab.report.judged import ReportRun
from foretoken.lab.stats.intervals import Interval, unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class PlotAxis:
    """A number that differs, and the runs in its order."""

    name: str
    values: tuple[float, ...]
    runs: tuple[ReportRun, ...]

    def draw(self, axes: Axes) -> None:
        """Label the axis; a wide range is logarithmic, as loads are."""
        axes.set_xlabel(self.name)
        if spans_widely(self.values[0], self.values[-1]):
            plain_log(axes.xaxis)
            axes.set_xticks(self.values, [show_value(value) for value in self.values])
        else:
            axes.set_xticks(self.values)


def find_axis(runs: Sequence[ReportRun], overall: Overall) -> PlotAxis | None:
    """The number to draw along; None if there is none with two runs."""
    decides = next((i for i, run in enumerate(runs) if run.decision is overall.best), 0)
    for dimension in overall.dimensions:
        if not (dimension.is_traffic and dimension.is_number):
            continue
        rest = [d for d in overall.dimensions if d is not dimension]
        own = [i for i in range(len(runs)) if all(_alike(d, i, decides) for d in rest)]
        own.sort(key=lambda i: float(dimension.values[i]))
        if len({dimension.values[i] for i in own}) > 1:
            return PlotAxis(
                name=dimension.name,
                values=tuple(float(dimension.values[i]) for i in own),
                runs=tuple(runs[i] for i in own),
            )
    return None


def _alike(dimension: Dimension, one: int, other: int) -> bool:
    return dimension.values[one] == dimension.values[other]


def gain_along(axis: PlotAxis, overall: Overall) -> Figure | None:
    """The gain of TPOT P50 with its interval and requests, and where it passes the limits."""
    gains = [run.summary.gain("tpot_p50") for run in axis.runs]
    points = [(x, g) for x, g in zip(axis.values, gains, strict=True) if g is not None]
    if len(points) < 2:
        return None
    figure, axes = new_figure()
    values = np.array([x for x, _ in points])
    axes.plot(values, [g.ratio.estimate for _, g in points], "o-", color=CANDIDATE)
    _band(axes, values, [g.ratio for _, g in points], CANDIDATE)
    for x, gain in points:
        axes.annotate(f"n={gain.num_pairs}", (x, gain.ratio.estimate), xytext=(0, -15),
                      textcoords="offset points", fontsize=8, color=FAINT, ha="center")  # fmt: skip
    for limit, colour in ((1.0, BAD), (1.3, GOOD)):
        axes.axhline(limit, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
    for named in overall.crossings:
        found = named.crossing
        if named.dimension != axis.name or not values[0] <= found.at.estimate <= values[-1]:
            continue
        colour = BAD if found.limit == 1.0 else GOOD
        ends = np.clip([found.at.low, found.at.high], values[0], values[-1])
        axes.plot(ends, [found.limit] * 2, color=colour, linewidth=5, alpha=0.35,
                  solid_capstyle="round")  # fmt: skip
        axes.plot(found.at.estimate, found.limit, "D", color=colour, markersize=7)
        axes.annotate(f"{found.limit:.1f}x at {found.at.estimate:.3g}",
                      (found.at.estimate, found.limit), xytext=(8, 7),
                      textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
    axis.draw(axes)
    axes.margins(y=0.15)
    axes.set_ylabel("gain of TPOT P50")
    return figure


def gain_by_run(runs: Sequence[ReportRun], overall: Overall) -> Figure | None:
    """A row per run: its gain of TPOT P50, named by what differs."""
    rows = [
        (_name(overall.dimensions, index) or run.name, gain)
        for index, run in enumerate(runs)
        if (gain := run.summary.gain("tpot_p50")) is not None
    ]
    if len(rows) < 2:
        return None
    return gain_rows(rows, 0.9 + 0.36 * len(rows), "gain of TPOT P50 with 95 % interval")


def _name(dimensions: Sequence[Dimension], row: int) -> str:
    return ", ".join(f"{d.name} {d.show(row)}" for d in dimensions[:3])


def _band(axes: Axes, values: np.ndarray, ratios: Sequence[Interval], colour: str) -> None:
    ends = np.array([[ratio.low, ratio.high] for ratio in ratios])
    if np.isfinite(ends).all():
        axes.fill_between(values, ends[:, 0], ends[:, 1], color=colour, alpha=0.14, linewidth=0)


def latency(axis: PlotAxis, metric: str) -> Figure | None:
    """P50 and P99 of both arms; `metric` is tpot or ttft."""
    figure, axes = new_figure()
    for name, colour in (("baseline", BASELINE), ("candidate", CANDIDATE)):
        arms = [_arm(run, name) for run in axis.runs]
        found: list[Quantiles | None] = [getattr(arm, metric) for arm in arms]
        known = [(x, q) for x, q in zip(axis.values, found, strict=True) if q is not None]
        if len(known) < 2:
            return None
        for quantile, style in (("p50", "-"), ("p99", "--")):
            values: list[Interval] = [getattr(q, quantile).scaled(1e3) for _, q in known]
            axes.plot([x for x, _ in known], [v.estimate for v in values], style,
                      marker="o", markersize=4, color=colour,
                      label=f"{arms[0].arm} {quantile.upper()}")  # fmt: skip
            _band(axes, np.array([x for x, _ in known]), values, colour)
    plain_log(axes.yaxis)
    axis.draw(axes)
    axes.set_ylabel(f"{metric.upper()}, ms")
    axes.legend(ncols=2)
    return figure


def goodput(axis: PlotAxis) -> Figure | None:
    """Requests per second within their service levels, both arms."""
    pairs = [(x, [_arm(run, name).goodput_per_s for name in ("baseline", "candidate")])
             for x, run in zip(axis.values, axis.runs, strict=True)]  # fmt: skip
    known = [(x, found) for x, found in pairs if None not in found]
    if len(known) < 2:
        return None
    figure, axes = new_figure()
    values = np.array([x for x, _ in known])
    summary = axis.runs[0].summary
    for arm, colour in enumerate((BASELINE, CANDIDATE)):
        rates = [found[arm] or unknown() for _, found in known]
        axes.plot(values, [v.estimate for v in rates], "o-", color=colour,
                  label=(summary.baseline, summary.candidate)[arm])  # fmt: skip
        _band(axes, values, rates, colour)
    axes.set_ylim(bottom=0)
    axis.draw(axes)
    axes.set_ylabel("good requests per second")
    axes.legend()
    return figure


def frontier(axis: PlotAxis) -> Figure | None:
    """Tokens per second of the server against tokens per second of a user, both arms."""
    figure, axes = new_figure()
    for name, colour in (("baseline", BASELINE), ("candidate", CANDIDATE)):
        arms = [_arm(run, name) for run in axis.runs]
        points = [
            (1 / arm.tpot.p50.estimate, arm.tokens_per_s.estimate)
            for arm in arms
            if arm.tpot is not None and arm.tpot.p50.estimate > 0
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=arms[0].arm)
    axes.set_xlabel("tokens per second of one user (1 / TPOT P50)")
    axes.set_ylabel("tokens per second of the server")
    axes.legend()
    return figure


def _arm(run: ReportRun, name: str) -> ArmSummary:
    return run.summary.arm(getattr(run.summary, name))
