"""Plots about time: gains with intervals, distributions, blocks, a timeline."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.records.results import Gain, RequestRecord
from foretoken.lab.report.canvas import (
    BAD,
    BASELINE,
    CANDIDATE,
    FAINT,
    GOOD,
    WARN,
    new_figure,
    plain_log,
)
from foretoken.lab.report.judged import ReportRun

LIMITS = (1.0, 1.3)
WIDEST = 1.3
MOST_LANES = 60


def gains(run: ReportRun) -> Figure | None:
    """Every gain with its interval, and the lines of 1.0 and 1.3."""
    found = [g for g in run.summary.gains if np.isfinite(g.ratio.estimate)]
    if not found:
        return None
    figure, axes = new_figure(height=0.75 + 0.33 * len(found))
    # One interval of a tail that few requests know would squeeze all others together.
    known = [g.ratio for g in found if g.ratio.known]
    most = WIDEST * max(g.ratio.estimate for g in found)
    right = min(most, max([LIMITS[1], *(ratio.high for ratio in known)]))
    for row, one in enumerate(reversed(found)):
        _gain(axes, row, one, right)
    for limit, colour in zip(LIMITS, (BAD, GOOD), strict=True):
        axes.axvline(limit, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(f"{limit:.1f}x", (limit, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(0, 3), textcoords="offset points", color=colour, ha="center",
                      fontsize=9, annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(found)), [label(g.metric) for g in reversed(found)])
    axes.set_ylim(-0.6, len(found) - 0.3)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("gain with 95 % interval (right is better)")
    return figure


def _gain(axes: Axes, row: int, gain: Gain, right: float) -> None:
    """A row; an interval that goes on beyond `right` is cut there, with an arrow."""
    ratio = gain.ratio
    if not ratio.known:
        axes.plot(ratio.estimate, row, "o", mfc="none", color=FAINT)
        return
    colour = GOOD if ratio.low >= 1 else (BAD if ratio.high < 1 else WARN)
    end = min(ratio.high, right)
    if end < ratio.high:
        axes.plot(end, row, ">", color=colour, markersize=5)
    axes.plot([ratio.low, end], [row, row], color=colour, linewidth=2.4,
              solid_capstyle="round", alpha=0.9 if gain.enough else 0.4)  # fmt: skip
    axes.plot(ratio.estimate, row, "o", color=colour, markersize=6)
    axes.annotate(f"{ratio.estimate:.2f}x", (end, row), xytext=(7, 0),
                  textcoords="offset points", va="center", fontsize=9)  # fmt: skip


def label(metric: str) -> str:
    """`TPOT P50` for `tpot_p50`."""
    head, _, tail = metric.partition("_")
    names = {"tokens": "tokens/s", "requests": "requests/s", "e2e": "whole answer"}
    if metric in ("tokens_per_s", "requests_per_s"):
        return names[head]
    plain = metric in ("cost", "goodput")
    quantile = tail if tail == "mean" else tail.upper()
    return f"{names.get(head, head if plain else head.upper())} {quantile}".strip()


def distribution(run: ReportRun, metric: str) -> Figure | None:
    """Share of requests below each time, both arms; `metric` is tpot_s, ttft_s or e2e_s."""
    figure, axes = new_figure()
    drawn = 0
    for arm, colour in _arms(run):
        values = np.sort([getattr(r, metric) for r in run.of_arm(arm)])
        values = values[np.isfinite(values)]
        if values.size < 2:
            continue
        drawn += 1
        shares = np.arange(1, values.size + 1) / values.size
        middle, tail = (1e3 * np.quantile(values, q) for q in (0.5, 0.99))
        name = f"{arm}: P50 {middle:.3g}, P99 {tail:.3g} ms"
        axes.step(1e3 * values, 100 * shares, where="post", color=colour, label=name)
        axes.plot([middle, tail], [50, 99], "o", color=colour, markersize=4.5)
    if not drawn:
        return None
    if metric != "tpot_s":
        plain_log(axes.xaxis)
    axes.set_xlabel(f"{metric.removesuffix('_s').upper()}, ms")
    axes.set_ylabel("requests, %")
    axes.legend(loc="lower right")
    return figure


def blocks(run: ReportRun) -> Figure | None:
    """The gain of each block: what restarts alone do."""
    gain = run.summary.gain("tpot_p50")
    if gain is None or len(gain.ratio_by_block) < 2:
        return None
    figure, axes = new_figure(height=2.8)
    values = np.asarray(gain.ratio_by_block)
    axes.vlines(range(1, values.size + 1), gain.ratio.estimate, values, color=BASELINE,
                linewidth=1.2)  # fmt: skip
    axes.plot(range(1, values.size + 1), values, "o", color=CANDIDATE)
    axes.axhline(gain.ratio.estimate, color=CANDIDATE, linewidth=1.2)
    if gain.ratio.known:
        axes.axhspan(gain.ratio.low, gain.ratio.high, color=CANDIDATE, alpha=0.12, linewidth=0)
    axes.axhline(LIMITS[1], color=GOOD, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.set_xlabel("block (one start of each server)")
    axes.set_ylabel("gain of TPOT P50")
    return figure


def timeline(run: ReportRun) -> Figure | None:
    """The first requests of both arms: waiting, first token, writing."""
    lanes = {arm: _first_block(run.of_arm(arm)) for arm, _ in _arms(run)}
    if not all(lanes.values()):
        return None
    figure = new_figure(width=6.4, height=4.2)[0]
    figure.clear()
    pair = figure.subplots(2, 1, sharex=True)
    for axes, (arm, colour) in zip(pair, _arms(run), strict=True):
        start = min(r.scheduled_s for r in lanes[arm])
        for row, request in enumerate(lanes[arm]):
            times = (request.scheduled_s, request.first_s, request.last_s)
            due, first, last = (float(t or 0.0) - start for t in times)
            axes.plot([due, first], [row, row], color=WARN, linewidth=2.0, solid_capstyle="butt")
            axes.plot([first, last], [row, row], color=colour, linewidth=2.0, solid_capstyle="butt")
        axes.set_ylabel(arm)
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
    pair[1].set_xlabel("seconds (orange: until the first token)")
    return figure


def _first_block(requests: list[RequestRecord]) -> list[RequestRecord]:
    if not requests:
        return []
    block = min(r.block for r in requests)
    found = [r for r in requests if r.block == block and r.last_s is not None]
    return sorted(found, key=lambda r: r.scheduled_s)[:MOST_LANES]


def _arms(run: ReportRun) -> tuple[tuple[str, str], tuple[str, str]]:
    return (run.summary.baseline, BASELINE), (run.summary.candidate, CANDIDATE)
