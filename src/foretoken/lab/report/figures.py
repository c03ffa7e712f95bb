"""Which plots a report has, in which order, with what they show in a sentence and from how many.

Four of them are the answer's pictures: latency, acceptance by position, load, classes. The others
are for whoever asks why.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from foretoken.lab.decide.overall import Overall
from foretoken.lab.report import accepted, by_class, by_dimension, times
from foretoken.lab.report.canvas import as_png, as_svg, house_style
from foretoken.lab.report.judged import ReportRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A drawn plot."""

    name: str
    title: str
    says: str
    """What is to be seen, and n."""
    svg: str
    png: bytes


_One = Callable[[ReportRun], Figure | None]
_Row = tuple[str, str, str, Callable[[ReportRun], str], _One]


def _requests(run: ReportRun) -> str:
    gain = run.summary.gain("tpot_p50")
    if gain is None:
        return f"n = {run.summary.arm(run.summary.candidate).num_requests:,} requests"
    return f"n = {gain.num_pairs:,} requests an arm, {gain.num_blocks} starts of each server"


def _verifications(run: ReportRun) -> str:
    bucket = run.summary.arm(run.summary.candidate).all_drafts
    if bucket is None:
        return ""
    steps = f"{bucket.num_steps:,} verifications" if bucket.num_steps else (
        f"{bucket.num_drafted:,} drafted tokens"
    )  # fmt: skip
    return f"n = {steps} of {bucket.num_requests:,} requests"


ONE_RUN: tuple[_Row, ...] = (
    ("latency", "Latency", "How long requests took, without and with speculation; hollow: too few "
     "for an interval.", _requests,
     times.latencies),
    ("position", "Acceptance by position", "Bars fall by nature; the line tells whether later "
     "guesses are worse.", _verifications, accepted.by_position),
    ("steps", "What a step costs by load", "Mean step by requests that decode at once; the "
     "factor is a step of the candidate, drafts or not, over a plain one.", _requests,
     times.step_cost),
    ("classes", "Gain by class", "Requests of one class against the same requests without "
     "speculation.", _requests, by_class.class_gains),
    ("acceptance", "Acceptance by class", "Circle: share of drafted tokens that were accepted. "
     "Tick: P10 as measured, noise included.", _verifications, by_class.rates),
    ("gains", "Every gain", "Baseline over candidate for times, the other way round for rates. "
     "Green excludes 1, red is a loss, orange is open.", _requests, times.gains),
    ("tpot", "Time per output token", "Every request, both arms.", _requests,
     partial(times.distribution, metric="tpot_s")),
    ("ttft", "Time to first token", "Speculation does not make it earlier; it must not make it "
     "later.", _requests, partial(times.distribution, metric="ttft_s")),
    ("blocks", "Block by block", "How much two starts of the same servers differ. The band is the "
     "interval of the whole.", _requests, times.blocks),
    ("temperature", "Accepted drafts by temperature", "One verification is one count.",
     _verifications, by_class.histograms),
    ("other_k", "Tokens per verification at another k", "Smaller k follow exactly from the "
     "recorded steps; larger ones are an estimate.", _verifications, accepted.other_k),
    ("timeline", "Timeline of the first block", "A line is a request.", _requests,
     times.timeline),
    ("server", "The server over time", "Squeezed memory shows as preemptions.", _requests,
     times.over_time),
)  # fmt: skip
_Along = Callable[[by_dimension.PlotAxis], Figure | None]
ALONG: tuple[tuple[str, str, str, _Along], ...] = (
    ("tpot_along", "Time per output token", "P50 solid, P99 dashed, 95 % bands.",
     partial(by_dimension.latency, metric="tpot")),
    ("ttft_along", "Time to first token", "P50 solid, P99 dashed, 95 % bands.",
     partial(by_dimension.latency, metric="ttft")),
    ("goodput_along", "Goodput", "Requests within their service levels.",
     by_dimension.goodput),
    ("frontier", "Throughput against interactivity", "Up and right is better.",
     by_dimension.frontier),
)  # fmt: skip
_FIRST = (("latency", "gains"), ("position",), ("gain", "steps"), ("classes", "acceptance"))
"""The pictures of the first screen, each with what takes its place where there is no data."""


def run_plots(run: ReportRun) -> tuple[Plot, ...]:
    """The plots of one run for which there is data."""
    with house_style():
        drawn = [
            _draw(f"{run.name}-{name}", title, f"{says} {count(run)}", partial(make, run))
            for name, title, says, count, make in ONE_RUN
        ]
    return tuple(plot for plot in drawn if plot is not None)


def plots_together(runs: Sequence[ReportRun], overall: Overall) -> tuple[Plot, ...]:
    """The plots over several runs, the gain first; none for a single one."""
    axis = by_dimension.find_axis(runs, overall)
    with house_style():
        if axis is None:
            says = "TPOT P50, a row per run. Green excludes 1, red is a loss, orange is open."
            drawn = [_draw("gain", "Gain by run", says,
                           partial(by_dimension.gain_by_run, runs, overall))]  # fmt: skip
        else:
            says = "Diamonds and their bars: where it passes 1.3 and 1, with a 95 % interval."
            drawn = [_draw("gain", f"Gain by {axis.name}", says,
                           partial(by_dimension.gain_along, axis, overall))]  # fmt: skip
            drawn += [
                _draw(name, f"{title} by {axis.name}" if name != "frontier" else title, says,
                      partial(make, axis))
                for name, title, says, make in ALONG
            ]  # fmt: skip
    return tuple(plot for plot in drawn if plot is not None)


def first_screen(own: Sequence[Plot], together: Sequence[Plot], name: str) -> tuple[Plot, ...]:
    """The four pictures of the answer; `own` are those of the run called `name`."""
    by_name = {plot.name.removeprefix(f"{name}-"): plot for plot in own}
    by_name |= {plot.name: plot for plot in together}
    wanted = (next((n for n in choices if n in by_name), None) for choices in _FIRST)
    return tuple(by_name[found] for found in wanted if found is not None)


def _draw(name: str, title: str, says: str, make: Callable[[], Figure | None]) -> Plot | None:
    figure = make()
    if figure is None:
        return None
    return Plot(name=name, title=title, says=says, svg=as_svg(figure, name), png=as_png(figure))
