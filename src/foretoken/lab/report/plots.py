"""Which plots a report has, in which order, with what they show in a sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from foretoken.lab.report import (
    plots_acceptance,
    plots_load,
    plots_server,
    plots_steps,
    plots_time,
)
from foretoken.lab.report.canvas import as_png, as_svg, house_style
from foretoken.lab.report.data import ReportRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawn plot."""

    name: str
    title: str
    says: str
    svg: str
    png: bytes


_One = Callable[[ReportRun], Figure | None]
ONE_RUN: tuple[tuple[str, str, str, _One], ...] = (
    ("gains", "Gains", "Baseline over candidate for times, the other way round for rates. "
     "Green excludes 1, red is a loss, orange is open.", plots_time.gains),
    ("tpot", "Time per output token", "Every request, both arms.",
     partial(plots_time.distribution, metric="tpot_s")),
    ("ttft", "Time to first token", "Speculation does not make it earlier; it must not make it "
     "later.", partial(plots_time.distribution, metric="ttft_s")),
    ("blocks", "Block by block", "How much two starts of the same servers differ. The band is the "
     "interval of the whole.", plots_time.blocks),
    ("acceptance", "Acceptance by class", "Circle: share of drafted tokens that were accepted. "
     "Tick: P10 as measured, noise included.", plots_acceptance.rates),
    ("position", "Acceptance by position", "Bars fall by nature; the line tells whether later "
     "guesses are worse.", plots_acceptance.by_position),
    ("temperature", "Accepted drafts by temperature", "One verification is one count.",
     plots_acceptance.by_temperature),
    ("other_k", "Tokens per verification at another k", "Smaller k follow exactly from the "
     "recorded steps; larger ones are an estimate.", plots_acceptance.other_k),
    ("steps", "What a verification costs", "A step of the candidate over one of the baseline is "
     "V + k c; dots are medians, bars the middle half.", plots_steps.step_cost),
    ("timeline", "Timeline of the first block", "A line is a request.", plots_time.timeline),
    ("server", "The server over time", "Squeezed memory shows as preemptions.",
     plots_server.over_time),
)  # fmt: skip
_Many = Callable[[Sequence[ReportRun]], Figure | None]
ALL_RUNS: tuple[tuple[str, str, str, _Many], ...] = (
    ("crossover", "Gain by load", "Where it falls through 1.3 and through 1.",
     plots_load.crossover),
    ("tpot_by_load", "Time per output token by load", "P50 solid, P99 dashed, 95 % bands.",
     partial(plots_load.latency, metric="tpot")),
    ("ttft_by_load", "Time to first token by load", "P50 solid, P99 dashed, 95 % bands.",
     partial(plots_load.latency, metric="ttft")),
    ("goodput_by_load", "Goodput by load", "Requests within their service levels.",
     plots_load.goodput),
    ("frontier", "Throughput against interactivity", "Up and right is better.",
     plots_load.frontier),
)  # fmt: skip


def run_plots(run: ReportRun) -> tuple[Plot, ...]:
    """The plots of one run for which there is data."""
    with house_style():
        drawn = [_draw(f"{run.name}-{name}", title, says, partial(make, run))
                 for name, title, says, make in ONE_RUN]  # fmt: skip
    return tuple(plot for plot in drawn if plot is not None)


def load_plots(runs: Sequence[ReportRun]) -> tuple[Plot, ...]:
    """The plots over several runs; none for a single one."""
    with house_style():
        drawn = [_draw(name, title, says, partial(make, runs))
                 for name, title, says, make in ALL_RUNS]  # fmt: skip
    return tuple(plot for plot in drawn if plot is not None)


def _draw(name: str, title: str, says: str, make: Callable[[], Figure | None]) -> Plot | None:
    figure = make()
    if figure is None:
        return None
    return Plot(name=name, title=title, says=says, svg=as_svg(figure, name), png=as_png(figure))
