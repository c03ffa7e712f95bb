"""Write docs/scaling.svg: what routing by known prefixes finds and saves, by number of replicas.

    python benchmarks/router_simulated.py --users 32 --policies random least prefix | tee routed.txt
    python scripts/draw_scaling.py routed.txt

Above the share of prompt tokens that replicas had in their caches, below the 99th percentile of
the time to the first token; for each policy the median over starts. Simulated, as
the picture says. Knows the last line of the file, and nothing of how it was made.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from pictures import SERIES, WIDTH, as_image

from foretoken.lab.report.canvas import empty_figure, house_style, plain_log

PICTURE = Path(__file__).parents[1] / "docs" / "scaling.svg"
NAMES = {
    "random": "random",
    "turns": "round robin",
    "least": "fewest requests",
    "prefix": "longest known prefix",
}
"""By what the benchmark calls them, in the order of their colours."""
DASHES = ("-", (0, (4, 2)), (0, (1, 2)))
"""Of the loads, the lightest first."""


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="+", help="what the benchmark printed")
    parser.add_argument("--to", type=Path, default=PICTURE, help="default: docs/scaling.svg")
    given = parser.parse_args()
    cases = [case for file in given.file for case in cases_of(file.read_text("utf-8"))]
    given.to.write_text(draw(cases) + "\n", "utf-8")


def cases_of(text: str) -> list[Mapping[str, Any]]:
    """The cases of one run, from its last line."""
    last = text.rstrip().rpartition("\n")[2]
    found: list[Mapping[str, Any]] = json.loads(last)["results"]["cases"]
    return found


def draw(cases: Sequence[Mapping[str, Any]]) -> str:
    """The picture as an `<svg>` element."""
    with house_style():
        figure = empty_figure(WIDTH, 5.8)
        above, below = figure.subplots(2, 1)
        draw_lines(above, cases, "found")
        above.set_ylim(0.0, 1.0)
        above.set_title("Found in a cache")
        above.set_ylabel("share of prompt tokens")
        draw_lines(below, cases, "ttft_p99")
        below.set_ylim(bottom=0.0)
        below.set_title("First token, 99th percentile")
        below.set_ylabel("seconds (simulated)")
        handles, labels = above.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=1)
        return as_image(figure, "scaling")


def draw_lines(axes: Axes, cases: Sequence[Mapping[str, Any]], name: str) -> None:
    """One line for each policy and load: medians over starts by number of replicas."""
    loads = sorted({case["case"]["users"] for case in cases})
    for policy, color in zip(NAMES, SERIES, strict=False):
        for load, dashes in zip(loads, DASHES, strict=False):
            points = points_of(cases, policy, load, name)
            if points:
                axes.plot(*zip(*points, strict=True), color=color, linestyle=dashes, marker="o",
                          markersize=4, label=f"{NAMES[policy]}, {load} users each")  # fmt: skip
    plain_log(axes.xaxis, subs=(1, 2, 4, 8))
    axes.set_xticks(sorted({case["case"]["replicas"] for case in cases}))
    axes.set_xticks([], minor=True)
    axes.set_xlabel("replicas")


def points_of(
    cases: Sequence[Mapping[str, Any]], policy: str, users: int, name: str
) -> list[tuple[int, float]]:
    """(replicas, median over starts) of one policy at one load, by rising number of replicas."""
    return sorted(
        (case["case"]["replicas"], median(start[name] for start in case["starts"][policy]))
        for case in cases
        if case["case"]["users"] == users and policy in case["starts"]
    )


if __name__ == "__main__":
    main()
