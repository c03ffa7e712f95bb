"""Plots over several A/Bs at different loads: latency, the gain and its crossover, the frontier."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from foretoken.lab.records.results import ArmSummary, Quantiles
from foretoken.lab.report.canvas import (
    BAD,
    BASELINE,
    CANDIDATE,
    GOOD,
    new_figure,
    plain_log,
)
from foretoken.lab.report.judged import ReportRun
from foretoken.lab.stats.intervals import Interval, unknown


def latency(runs: Sequence[ReportRun], metric: str) -> Figure | None:
    """P50 and P99 of both arms against the load; `metric` is tpot or ttft."""
    runs = sorted(runs, key=lambda run: run.load)
    if len(runs) < 2:
        return None
    figure, axes = new_figure()
    loads = [run.load for run in runs]
    for name, colour in (("baseline", BASELINE), ("candidate", CANDIDATE)):
        arms = [_arm(run, name) for run in runs]
        found: list[Quantiles | None] = [getattr(arm, metric) for arm in arms]
        known = [(load, q) for load, q in zip(loads, found, strict=True) if q is not None]
        if len(known) < 2:
            return None
        for quantile, style in (("p50", "-"), ("p99", "--")):
            values: list[Interval] = [getattr(q, quantile) for _, q in known]
            axes.plot([load for load, _ in known], [1e3 * v.estimate for v in values], style,
                      marker="o", markersize=4, color=colour,
                      label=f"{arms[0].arm} {quantile.upper()}")  # fmt: skip
            ends = np.array([[1e3 * v.low, 1e3 * v.high] for v in values])
            if np.isfinite(ends).all():
                axes.fill_between([load for load, _ in known], ends[:, 0], ends[:, 1],
                                  color=colour, alpha=0.12, linewidth=0)  # fmt: skip
    plain_log(axes.yaxis)
    axes.set_xlabel("requests per second")
    axes.set_ylabel(f"{metric.upper()}, ms")
    axes.legend(ncols=2)
    return figure


def goodput(runs: Sequence[ReportRun]) -> Figure | None:
    """Requests per second within their service levels, both arms, against the load."""
    runs = sorted(runs, key=lambda run: run.load)
    pairs = [(run, [_arm(run, name).goodput_per_s for name in ("baseline", "candidate")])
             for run in runs]  # fmt: skip
    known = [(run, found) for run, found in pairs if None not in found]
    if len(known) < 2:
        return None
    figure, axes = new_figure()
    loads = [run.load for run, _ in known]
    for arm, colour in enumerate((BASELINE, CANDIDATE)):
        values = [found[arm] or unknown() for _, found in known]
        summary = known[0][0].summary
        axes.plot(loads, [v.estimate for v in values], "o-", color=colour,
                  label=(summary.baseline, summary.candidate)[arm])  # fmt: skip
        ends = np.array([[v.low, v.high] for v in values])
        if np.isfinite(ends).all():
            axes.fill_between(loads, ends[:, 0], ends[:, 1], color=colour, alpha=0.12, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests per second")
    axes.set_ylabel("good requests per second")
    axes.legend()
    return figure


def crossover(runs: Sequence[ReportRun]) -> Figure | None:
    """The gain against the load, with the lines of 1.0 and 1.3 and where it falls below."""
    runs = sorted(runs, key=lambda run: run.load)
    points = [(run.load, gain.ratio) for run in runs if (gain := run.summary.gain("tpot_p50"))]
    if len(points) < 2:
        return None
    figure, axes = new_figure()
    loads = np.array([load for load, _ in points])
    middle = np.array([ratio.estimate for _, ratio in points])
    axes.plot(loads, middle, "o-", color=CANDIDATE)
    ends = np.array([[ratio.low, ratio.high] for _, ratio in points])
    if np.isfinite(ends).all():
        axes.fill_between(loads, ends[:, 0], ends[:, 1], color=CANDIDATE, alpha=0.15, linewidth=0)
    for limit, colour in ((1.0, BAD), (1.3, GOOD)):
        axes.axhline(limit, color=colour, linewidth=1.2, linestyle=(0, (4, 3)))
        load = crossing_load(loads, middle, limit)
        if load is not None:
            axes.plot(load, limit, "D", color=colour, markersize=7)
            axes.annotate(f"{limit:.1f}x at {load:.1f}/s", (load, limit), xytext=(8, 6),
                          textcoords="offset points", fontsize=9, color=colour)  # fmt: skip
    axes.set_xlabel("requests per second")
    axes.set_ylabel("gain of TPOT P50")
    return figure


def crossing_load(loads: np.ndarray, gains: np.ndarray, limit: float) -> float | None:
    """The first load at which the gain falls through `limit`; None if it does not."""
    for i in range(1, loads.size):
        if gains[i - 1] >= limit > gains[i]:
            share = (gains[i - 1] - limit) / (gains[i - 1] - gains[i])
            return float(loads[i - 1] + share * (loads[i] - loads[i - 1]))
    return None


def frontier(runs: Sequence[ReportRun]) -> Figure | None:
    """Tokens per second of the server against tokens per second of a user, both arms."""
    if len(runs) < 2:
        return None
    figure, axes = new_figure()
    for name, colour in (("baseline", BASELINE), ("candidate", CANDIDATE)):
        arms = [_arm(run, name) for run in sorted(runs, key=lambda run: run.load)]
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
