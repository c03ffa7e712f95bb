"""Write docs/acceptance-cost.svg: what each drafter accepts after how much training.

    python scripts/draw_training.py runs/demo-eagle3 runs/demo-dspark ...

One line for each run, from the measurements that its newest checkpoint holds: accepted tokens a
step by millions of tokens seen. Knows neither what the runs trained nor how.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from pictures import WIDTH, as_image, line_style

from foretoken.lab.report.canvas import empty_figure, house_style, plain_log
from foretoken.training.run_folder import newest_state

PICTURE = Path(__file__).parents[1] / "docs" / "acceptance-cost.svg"
Point = tuple[float, float]


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, nargs="+", help="a folder of `foretoken train`")
    parser.add_argument(
        "--to", type=Path, default=PICTURE, help="default: docs/acceptance-cost.svg"
    )
    given = parser.parse_args()
    lines = {run.name: points_of(newest_state(run)["progress"]["history"]) for run in given.run}
    given.to.write_text(draw(lines) + "\n", "utf-8")


def points_of(history: Sequence[Mapping[str, float]]) -> list[Point]:
    """(millions of tokens seen, tokens a step) of a run's measurements, in their order."""
    return [(one["tokens"] / 1e6, one["tokens_a_step"]) for one in history]


def draw(lines: Mapping[str, Sequence[Point]]) -> str:
    """The picture as an `<svg>` element; the best line is named first."""
    ranked = sorted(lines, key=lambda name: -lines[name][-1][1])
    with house_style():
        figure = empty_figure(WIDTH, 4.4)
        axes = figure.subplots()
        for number, name in enumerate(ranked):
            axes.plot(*zip(*lines[name], strict=True), **line_style(number), markersize=4,
                      label=name)  # fmt: skip
        plain_log(axes.xaxis, subs=(1, 2, 5))
        axes.set_ylim(bottom=1.0)
        axes.set_xlabel("million tokens of training")
        axes.set_ylabel("tokens a step")
        figure.legend(loc="outside lower center", ncols=3)
        return as_image(figure, "acceptance-cost")


if __name__ == "__main__":
    main()
