"""Which plots a report has, in which order, with what they show in a sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from foretoken.lab.report import accepted, loads, times
from foretoken.lab.report.canvas import as_png, as_svg, house_style
from foretoken.lab.report.judged import ReportRun


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
     "Green excludes 1, red is a loss, orange is open.", times.gains),
    ("tpot", "Time per output token", "Every request, both arms.",
     partial(times.distribution, metric="tpot_s")),
    ("ttft", "Time to first token", "Speculation does not make it earlier; it must not make it "
     "later.", partial(times.distribution, metric="ttft_s")),
    ("blocks", "Block by block", "How much two starts of the same servers differ. The band is the "
     "interval of the whole.", times.blocks),
    ("acceptance", "Acceptance by class", "Circle: share of drafted tokens that were accepted. "
     "Tick: P10 as measured, noise included.", accepted.rates),
    ("position", "Acceptance by position", "Bars fall by nature; the line tells whether later "
     "guesses are worse.", accepted.by_position),
    ("temperature", "Accepted drafts by temperature", "One verification is one count.",
     accepted.by_temperature),
    ("other_k", "Tokens per verification at another k", "Smaller k follow exactly from the "
     "recorded steps; larger ones are an estimate.", accepted.other_k),
    ("steps", "What a verification costs", "A step of the candidate over one of the baseline is "
     "V + k c; dots are medians, bars the middle half.", times.step_cost),
    ("timeline", "Timeline of the first block", "A line is a request.", times.timeline),
    ("server", "The server over time", "Squeezed memory shows as preemptions.",
     times.over_time),
)  # fmt: skip
_Many = Callable[[Sequence[ReportRun]], Figure | None]
ALL_RUNS: tuple[tuple[str, str, str, _Many], ...] = (
    ("crossover", "Gain by load", "Where it falls through 1.3 and through 1.",
     loads.crossover),
    ("tpot_by_load", "Time per output token by load", "P50 solid, P99 dashed, 95 % bands.",
     partial(loads.latency, metric="tpot")),
    ("ttft_by_load", "Time to first token by load", "P50 solid, P99 dashed, 95 % bands.",
     partial(loads.latency, metric="ttft")),
    ("goodput_by_load", "Goodput by load", "Requests within their service levels.",
     loads.goodput),
    ("frontier", "Throughput against interactivity", "Up and right is better.",
     loads.frontier),
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
