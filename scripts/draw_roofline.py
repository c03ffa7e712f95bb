"""Write docs/roofline.svg: every engine of `benchmarks/peers.py` against the floor, and its speed.

    python benchmarks/peers.py --models MODELS --environments FOLDER | tee peers.txt
    python scripts/draw_roofline.py peers.txt

Above stands what has a floor: reading all weights, keys and values once, or making all
products, whichever takes longer, as fast as the machine did either in the minute of the turn.
Below stand other speeds. Start-up and the loop's overhead are neither. Knows the last line of
the file, and nothing of how it was measured.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from pictures import SERIES, WIDTH, as_image

from foretoken.lab.report.canvas import FAINT, INK, empty_figure, house_style, plain_log

PICTURE = Path(__file__).parents[1] / "docs" / "roofline.svg"
OURS = "foretoken"
NAMES = {
    OURS: "Foretoken",
    "openvino": "OpenVINO",
    "llama-cpp": "llama.cpp",
    "vllm": "vLLM",
    "onnxruntime": "ONNX Runtime",
}
"""By what the benchmark calls them, in the order of their colours."""
WIDE, EIGHT = "o", "D"
"""Markers: of activations in 16 bits, and of those that are rounded to 8."""
INCHES = 0.4
"""Of a line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """An engine at a line."""

    engine: str
    """A key of NAMES."""
    eight_bits: bool
    """Whether it rounds activations to 8 bits."""
    at: float
    """The floor's time over the time taken; tokens a second where there is no floor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Equal work for everyone, with those who did it right."""

    name: str
    has_floor: bool
    points: tuple[Point, ...]


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="what benchmarks/peers.py printed")
    parser.add_argument("--to", type=Path, default=PICTURE, help="default: docs/roofline.svg")
    given = parser.parse_args()
    last = given.file.read_text("utf-8").rstrip().rpartition("\n")[2]
    given.to.write_text(draw(lines_of(json.loads(last))) + "\n", "utf-8")


def lines_of(document: Mapping[str, Any]) -> list[Line]:
    """What a document of the benchmark has of floors and speeds; our two modes share a line."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for row in document["results"]["rows"]:
        everyone = {**row["peers"], f"{OURS} {row['mode']}": row["ours"]}
        able = {name: one for name, one in everyone.items() if one and one["right"]}
        told = {name: one for name, one in able.items() if one["floor_s"] or _is_speed(one)}
        if told:
            found.setdefault(str(row["name"]), {}).update(told)
    lines = []
    for name, own in found.items():
        has_floor = all(one["floor_s"] for one in own.values())
        points = (_point(engine, one, has_floor) for engine, one in own.items())
        lines.append(Line(name=name, has_floor=has_floor, points=tuple(points)))
    return lines


def _is_speed(measured: Mapping[str, Any]) -> bool:
    return bool(measured["unit"] == "tokens/s")


def _point(name: str, measured: Mapping[str, Any], has_floor: bool) -> Point:
    share = median(measured["floor_s"]) / median(measured["seconds"]) if has_floor else 0.0
    return Point(
        engine=name.partition(" ")[0],
        # A note begins with the mode, as in "8-bit activations; k 3".
        eight_bits="activations" in measured["note"].partition(";")[0],
        at=share if has_floor else measured["shown"],
    )


def draw(lines: Sequence[Line]) -> str:
    """The picture as an `<svg>` element."""
    above = [line for line in lines if line.has_floor]
    below = [line for line in lines if not line.has_floor]
    heights = [len(above) + 1, len(below) + 1]
    with house_style():
        figure = empty_figure(WIDTH, 2.6 + INCHES * sum(heights))
        floors, speeds = figure.subplots(2, 1, height_ratios=heights)
        draw_lines(floors, above, ".2f")
        most = max((point.at for line in above for point in line.points), default=1.0)
        floors.set_xlim(0.0, 1.08 * max(1.0, most))
        floors.axvline(1.0, color=INK, linewidth=1.4)
        floors.set_title("How near to the floor")
        floors.set_xlabel("the floor's time / the time taken")
        draw_lines(speeds, below, ".0f")
        plain_log(speeds.xaxis)
        speeds.set_title("Speed where no floor is known")
        speeds.set_xlabel("tokens a second")
        figure.legend(handles=legend(lines), loc="outside lower center", ncols=2)
        return as_image(figure, "roofline")


def draw_lines(axes: Axes, lines: Sequence[Line], form: str) -> None:
    """Lines from top to bottom, each with a number at our faster point."""
    for row, line in enumerate(lines):
        first, last = (pick(point.at for point in line.points) for pick in (min, max))
        axes.plot([first, last], [row, row], color=FAINT, linewidth=0.8, zorder=1)
        for point in line.points:
            ours = point.engine == OURS
            axes.plot(point.at, row, EIGHT if point.eight_bits else WIDE, color=color(point.engine),
                      markersize=8 if ours else 6, zorder=3 if ours else 2)  # fmt: skip
        best = max((point.at for point in line.points if point.engine == OURS), default=None)
        if best is not None:
            axes.annotate(f"{best:{form}}", (best, row), xytext=(0, 6), ha="center", fontsize=9,
                          textcoords="offset points", color=color(OURS))  # fmt: skip
    axes.set_yticks(range(len(lines)), [line.name for line in lines])
    axes.set_ylim(len(lines) - 0.5, -0.7)


def color(engine: str) -> str:
    """Of an engine, the same in every picture."""
    return SERIES[list(NAMES).index(engine)]


def legend(lines: Sequence[Line]) -> list[Line2D]:
    """Who takes part, and what the markers are."""
    present = {point.engine for line in lines for point in line.points}
    engines = [(NAMES[name], WIDE, color(name)) for name in NAMES if name in present]
    modes = [("16-bit activations", WIDE, FAINT), ("8-bit activations", EIGHT, FAINT)]
    return [
        Line2D([], [], linestyle="none", marker=marker, color=shade, label=label)
        for label, marker, shade in (*engines, *modes)
    ]


if __name__ == "__main__":
    main()
