"""What a verification costs: step times of both arms by how many requests decode at once."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.analysis.fit import least_steps
from foretoken.lab.analysis.steps import StepTimes, step_times, without_prompts
from foretoken.lab.report.canvas import BASELINE, CANDIDATE, FAINT, new_figure
from foretoken.lab.report.judged import ReportRun
from foretoken.lab.stats.intervals import Floats


def step_cost(run: ReportRun) -> Figure | None:
    """Median step times, the middle half, and the ratio V + k c where both arms have enough."""
    names = (run.summary.baseline, run.summary.candidate)
    off, on = (step_times(run.of_arm(name)) for name in names)
    arms = without_prompts(off, on)
    common = sorted(set(_batches(arms[0])) & set(_batches(arms[1])))
    if not common:
        return None
    found = [np.array([_quartiles(steps, batch) for batch in common]) for steps in arms]
    figure, axes = new_figure(height=3.0)
    for name, quartiles_B3, colour in zip(names, found, (BASELINE, CANDIDATE), strict=True):
        _draw(axes, quartiles_B3, common, (name, colour))
    for batch, plain, verifying in zip(common, found[0][:, 1], found[1][:, 1], strict=True):
        axes.annotate(f"{verifying / plain:.2f}x", (batch, 1e3 * verifying), xytext=(12, 6),
                      textcoords="offset points", fontsize=9, color=FAINT)  # fmt: skip
    axes.set_xticks(common)
    axes.set_xlim(common[0] - 0.6, common[-1] + 0.6)
    axes.set_ylim(0, 1.4e3 * max(float(q[:, 2].max()) for q in found))
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("requests that decode at once")
    axes.set_ylabel("step, ms")
    axes.legend(ncols=2, loc="upper left")
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
