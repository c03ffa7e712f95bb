"""Write docs/control.svg: the draft lengths that plans choose, over load and over acceptance.

The planner of the engine is asked once for each point. It is given about what a billion parameters
in int8 take on two cores, and acceptances that are known. Nothing is drawn by chance.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from pictures import SERIES, WIDTH, as_image

from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import StepLoad
from foretoken.lab.report.canvas import empty_figure, house_style, plain_log
from foretoken.types import FinishReason, Request, SamplingParams

PICTURE = Path(__file__).parents[1] / "docs" / "control.svg"
TARGET = ((1, 0.030), (16, 0.066), (64, 0.200))
"""Seconds of a step by rows."""
PASS = ((1, 0.002), (64, 0.013))
"""Seconds of a pass of the draft model by rows."""
MOST = 8
LOADS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
KNOWN_ROWS = (*LOADS, 96, 128, 256, 512)
ACCEPTANCES = (0.95, 0.9, 0.8, 0.7, 0.5)
SHARES = [share / 40 for share in range(4, 40)]


@dataclass(frozen=True, slots=True)
class Decoding:
    """A sequence in the middle of a long answer."""

    request: Request
    num_tokens: int = 600
    num_output: int = 500
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None


def seconds(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Straight between two points, and on beyond the last."""
    place = min(max(bisect_left([known for known, _ in points], rows), 1), len(points) - 1)
    (low, low_s), (high, high_s) = points[place - 1], points[place]
    return low_s + (high_s - low_s) / (high - low) * (rows - low)


def main() -> None:
    """Write the picture."""
    with house_style():
        figure = empty_figure(WIDTH, 5.8)
        left, right = figure.subplots(2, 1)
        for chance, color in zip(ACCEPTANCES, SERIES, strict=False):
            drafts = [chosen(count, chance) for count in LOADS]
            left.plot(LOADS, drafts, color=color, marker="o", markersize=3, label=f"{chance:g}")
        for count, color in zip((1, 8, 32), SERIES, strict=False):
            drafts = [chosen(count, share) for share in SHARES]
            right.plot(SHARES, drafts, color=color, drawstyle="steps-mid", label=str(count))
        plain_log(left.xaxis)
        left.set_xticks([1, 2, 4, 8, 16, 32, 64])
        left.set_xticks([], minor=True)
        for axes in (left, right):
            axes.set_ylabel("drafts of each sequence")
        finish(left, "Over load", "sequences that decode", "acceptance")
        finish(right, "Over acceptance", "chance of each draft", "sequences")
        picture = as_image(figure, "control")
    PICTURE.write_text(picture + "\n", "utf-8")


def chosen(count: int, chance: float) -> float:
    """Mean drafts of so many sequences whose drafts have this chance, one after the other."""
    steps = [(StepShape(rows, rows), seconds(TARGET, rows)) for rows in KNOWN_ROWS]
    shapes = [DraftShape(n, k, n * k, 0.0) for n in (1, 4, 16, 64) for k in (1, 2, 4)]
    passes = [(shape, shape.passes * seconds(PASS, shape.sequences)) for shape in shapes]
    target = TargetStepTimeModel(steps, sd=0.1)
    planner = Planner(
        RequestBudget({"draft": MOST}),
        [DrafterFacts(name="draft", max_drafts=MOST)],
        target,
        {"draft": DrafterCost(passes, sd=0.1, machine=target)},
        LearnedAcceptance({"draft": chance}),
    )
    load = StepLoad(num_decoding=count, num_prefilling=0)
    plan = planner.make([decoding(number) for number in range(count)], load).plan
    return sum(plan.lengths) / count


def decoding(number: int) -> Decoding:
    """One of the sequences."""
    request = Request(
        request_id=str(number),
        prompt_token_ids=(1,) * 100,
        params=SamplingParams(temperature=0.0),
        seed=0,
        max_tokens=1 << 20,
    )
    return Decoding(request)


def finish(axes: Axes, title: str, what: str, legend: str) -> None:
    """Words around the lines."""
    axes.set_title(title)
    axes.set_xlabel(what)
    axes.legend(title=legend)


if __name__ == "__main__":
    main()
