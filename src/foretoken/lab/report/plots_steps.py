"""What a verification costs: step times of both arms by how many requests decode at once."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.fit import least_steps
from foretoken.lab.report.canvas import BASELINE, CANDIDATE, FAINT, new_figure
from foretoken.lab.report.data import ReportRun
from foretoken.lab.statistics import Floats
from foretoken.lab.steps import StepTimes, step_times


def step_cost(run: ReportRun) -> Figure | None:
    """Median step times, P25 to P75, and the ratio V + k c wherever both arms have steps enough."""
    arms = [step_times(run.of_arm(a)) for a in (run.summary.baseline, run.summary.candidate)]
    batches = [_batches(steps) for steps in arms]
    common = sorted(set(batches[0]) & set(batches[1]))
    if not common:
        return None
    figure, axes = new_figure(height=3.0)
    names = (run.summary.baseline, run.summary.candidate)
    for name, steps, own, colour in zip(names, arms, batches, (BASELINE, CANDIDATE), strict=True):
        _draw(axes, np.array([_quartiles(steps, batch) for batch in own]), own, (name, colour))
    for batch in common:
        plain, verifying = (_quartiles(steps, batch)[1] for steps in arms)
        axes.annotate(f"{verifying / plain:.2f}x", (batch, 1e3 * verifying), xytext=(0, 8),
                      textcoords="offset points", ha="center", fontsize=9, color=FAINT)  # fmt: skip
    axes.set_xticks(sorted({*batches[0], *batches[1]}))
    axes.set_ylim(bottom=0, top=1.2 * axes.get_ylim()[1])
    axes.set_xlim(common[0] - 0.6, max(*batches[0], *batches[1]) + 0.6)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("requests that decode at once")
    axes.set_ylabel("step, ms")
    axes.legend(ncols=2, loc="lower right")
    return figure


def _batches(steps: StepTimes) -> list[int]:
    """Batch sizes that were more than passed through."""
    sizes = np.unique(steps.batch_N)
    return [int(b) for b in sizes if steps.at(int(b)).seconds_N.size >= least_steps(steps)]


def _quartiles(steps: StepTimes, batch: int) -> Floats:
    found: Floats = np.quantile(steps.at(batch).seconds_N, (0.25, 0.5, 0.75))
    return found


def _draw(axes: Axes, quartiles_B3: Floats, batches: list[int], arm: tuple[str, str]) -> None:
    low, middle, high = 1e3 * quartiles_B3.T
    axes.vlines(batches, low, high, color=arm[1], alpha=0.35, linewidth=5)
    axes.plot(batches, middle, "o-", color=arm[1], label=arm[0])
