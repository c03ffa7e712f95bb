"""Plots about time: gains with intervals, distributions, blocks, a timeline, step times.

Also what the server said over time: cache use, waiting requests, preemptions.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from foretoken.lab.analysis.fit import StepTimes, least_steps, step_times, without_prompts
from foretoken.lab.records.results import ArmSummary, RequestRecord, Scrape
from foretoken.lab.report.canvas import (
    BAD,
    BASELINE,
    CANDIDATE,
    FAINT,
    GOOD,
    LIMITS,
    WARN,
    gain_rows,
    new_figure,
    plain_log,
)
from foretoken.lab.report.judged import ReportRun
from foretoken.lab.stats.intervals import Floats

WIDEST = 1.3
MOST_LANES = 60


def gains(run: ReportRun) -> Figure | None:
    """Every gain with its interval, and the lines of 1.0 and 1.3."""
    found = [g for g in run.summary.gains if np.isfinite(g.ratio.estimate)]
    if not found:
        return None
    # One interval of a tail that few requests know would squeeze all others together.
    known = [g.ratio for g in found if g.ratio.known]
    most = WIDEST * max(g.ratio.estimate for g in found)
    right = min(most, max([LIMITS[1], *(ratio.high for ratio in known)]))
    rows = [(label(g.metric), g) for g in found]
    below = "gain with 95 % interval (right is better; hollow: too few requests)"
    return gain_rows(rows, 0.75 + 0.33 * len(rows), below, right)


def latencies(run: ReportRun) -> Figure | None:
    """P50, P95 and P99 of both arms for the first token, each token and the whole answer."""
    arms = _both(run)
    rows = [
        (f"{name} {quantile.upper()}", [getattr(getattr(arm, key), quantile) for arm in arms])
        for key, name in (("tpot", "TPOT"), ("ttft", "TTFT"), ("e2e", "whole answer"))
        if all(getattr(arm, key) is not None for arm in arms)
        for quantile in ("p50", "p95", "p99")
    ]
    if not rows:
        return None
    figure, axes = new_figure(height=0.9 + 0.31 * len(rows))
    for row, (_, (before, after)) in enumerate(reversed(rows)):
        better = after.estimate <= before.estimate
        axes.plot([1e3 * before.estimate, 1e3 * after.estimate], [row, row],
                  color=GOOD if better else BAD, linewidth=3, alpha=0.5)  # fmt: skip
        for value, colour in ((before, BASELINE), (after, CANDIDATE)):
            if value.known:
                axes.plot([1e3 * value.low, 1e3 * value.high], [row, row], color=colour,
                          linewidth=7, alpha=0.25, solid_capstyle="butt")  # fmt: skip
            axes.plot(1e3 * value.estimate, row, "o", color=colour, markersize=6,
                      mfc=colour if value.known else "none")  # fmt: skip
        axes.annotate(f"{_shown(before.estimate)} to {_shown(after.estimate)}",
                      (1.0, row), xycoords=("axes fraction", "data"), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      annotation_clip=False)  # fmt: skip
    plain_log(axes.xaxis, subs=(1,))
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("ms (grey: without, blue: with speculation; bands: 95 %)")
    return figure


def _shown(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _both(run: ReportRun) -> tuple[ArmSummary, ArmSummary]:
    return run.summary.arm(run.summary.baseline), run.summary.arm(run.summary.candidate)


def label(metric: str) -> str:
    """`TPOT P50` for `tpot_p50`."""
    head, _, tail = metric.partition("_")
    names = {"tokens": "tokens/s", "requests": "requests/s", "e2e": "whole answer"}
    if metric in ("tokens_per_s", "requests_per_s"):
        return names[head]
    plain = metric in ("cost", "goodput")
    quantile = tail if tail in ("mean", "total") else tail.upper()
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
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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


def step_cost(run: ReportRun) -> Figure | None:
    """Mean step times, the middle half, and the means' ratio where both arms have enough."""
    names = (run.summary.baseline, run.summary.candidate)
    off, on = (step_times(run.of_arm(name)) for name in names)
    arms = without_prompts(off, on)
    common = sorted(set(_batches(arms[0])) & set(_batches(arms[1])))
    if not common:
        return None
    found = [np.array([_ends_and_mean(steps, batch) for batch in common]) for steps in arms]
    figure, axes = new_figure(height=3.0)
    for name, own_B3, colour in zip(names, found, (BASELINE, CANDIDATE), strict=True):
        _draw_steps(axes, own_B3, common, (name, colour))
    for batch, plain, verifying in zip(common, found[0][:, 1], found[1][:, 1], strict=True):
        axes.annotate(f"{verifying / plain:.2f}x", (batch, 1e3 * verifying), xytext=(12, 6),
                      textcoords="offset points", fontsize=9, color=FAINT)  # fmt: skip
    axes.set_xticks(common)
    axes.set_xlim(common[0] - 0.6, common[-1] + 0.6)
    axes.set_ylim(0, 1.4e3 * max(float(own_B3.max()) for own_B3 in found))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("requests that decode at once")
    axes.set_ylabel("step, ms")
    axes.legend(ncols=2, loc="upper left")
    return figure


def _batches(steps: StepTimes) -> list[int]:
    """Batch sizes that were more than passed through."""
    sizes = np.unique(steps.batch_N)
    return [int(b) for b in sizes if steps.at(int(b)).seconds_N.size >= least_steps(steps)]


def _ends_and_mean(steps: StepTimes, batch: int) -> Floats:
    """Mean between the quartiles: the median of steps of which few draft is a plain step."""
    seconds_N = steps.at(batch).seconds_N
    low, high = np.quantile(seconds_N, (0.25, 0.75))
    return np.array([low, seconds_N.mean(), high])


def _draw_steps(axes: Axes, own_B3: Floats, batches: list[int], arm: tuple[str, str]) -> None:
    low, middle, high = 1e3 * own_B3.T
    axes.vlines(batches, low, high, color=arm[1], alpha=0.35, linewidth=5)
    axes.plot(batches, middle, "o-", color=arm[1], label=arm[0])


PANELS = (
    ("vllm:kv_cache_usage_perc", "KV cache, %", 100.0, False),
    ("vllm:num_requests_waiting", "waiting requests", 1.0, False),
    ("vllm:num_preemptions", "preemptions", 1.0, True),
)
"""Metric, label, factor, and whether it is a counter that starts at its first value."""


def over_time(run: ReportRun) -> Figure | None:
    """One panel per metric that the server has, time aligned, both arms."""
    panels = [p for p in PANELS if any(p[0] in scrape.values for scrape in run.scrapes)]
    if not panels:
        return None
    figure = new_figure(width=6.4, height=0.6 + 1.35 * len(panels))[0]
    figure.clear()
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(grid, panels, strict=True):
        for arm, colour in ((run.summary.baseline, BASELINE), (run.summary.candidate, CANDIDATE)):
            _draw_panel(axes, [s for s in run.scrapes if s.arm == arm], panel, (arm, colour))
        axes.set_ylabel(panel[1])
        axes.set_ylim(bottom=0)
    grid[0].legend(ncols=2, loc="upper left")
    grid[-1].set_xlabel("seconds since the block began")
    return figure


def _draw_panel(
    axes: Axes, scrapes: list[Scrape], panel: tuple[str, str, float, bool], arm: tuple[str, str]
) -> None:
    """A line per block, all from zero."""
    metric, _, factor, counter = panel
    for number, block in enumerate(sorted({s.block for s in scrapes})):
        own = [s for s in scrapes if s.block == block and metric in s.values]
        if not own:
            continue
        times = np.array([s.time_s for s in own]) - own[0].time_s
        values = factor * np.array([s.values[metric] for s in own])
        values = values - values[0] if counter else values
        axes.plot(times, values, color=arm[1], alpha=0.75, linewidth=1.2,
                  marker="o" if times.size < 3 else None, markersize=3,
                  label=arm[0] if number == 0 else None)  # fmt: skip
