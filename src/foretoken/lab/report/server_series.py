"""Plots of what the server said over time: cache use, waiting requests, preemptions, drafts."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.records.results import Scrape
from foretoken.lab.report.canvas import BASELINE, CANDIDATE, new_figure
from foretoken.lab.report.judged import ReportRun

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
            _draw(axes, [s for s in run.scrapes if s.arm == arm], panel, (arm, colour))
        axes.set_ylabel(panel[1])
        axes.set_ylim(bottom=0)
    grid[0].legend(ncols=2, loc="upper left")
    grid[-1].set_xlabel("seconds since the block began")
    return figure


def _draw(
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
