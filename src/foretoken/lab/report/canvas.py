"""Figures in the house style, as SVG.

Owns colours, fonts and sizes, and how a gain is drawn. In a page every colour is a CSS variable, so
that a figure follows what is around it; in a file of its own there are a ground and rules for dark
schemes. Fixed salts make the output the same for the same data.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from foretoken.lab.records.results import ArmGain
from foretoken.lab.stats.intervals import Interval
from foretoken.lab.verdict import WORTH_IT

PALETTE = {
    "ink": ("#1f2a37", "#e6ebf2"),
    "faint": ("#66717f", "#9aa6b6"),
    "grid": ("#e3e8ef", "#2c3644"),
    "good": ("#147a47", "#4cc38a"),
    "bad": ("#b93131", "#ff7b7b"),
    "warn": ("#a8650f", "#f0b357"),
    "baseline": ("#8a94a6", "#93a0b4"),
    "series-1": ("#0061c6", "#5c9ff5"),
    "series-2": ("#d77400", "#f0a63a"),
    "series-3": ("#129e71", "#1fd6a0"),
    "series-4": ("#c2559b", "#f3a6d6"),
    "series-5": ("#8e2a00", "#d9613a"),
    "series-6": ("#259bbf", "#8fe0ff"),
    "series-7": ("#3d1e55", "#6f5bd6"),
}
"""Every colour on a light and on a dark ground, by its name in the page. Figures are drawn in the
light ones. The series are told apart without seeing red or green, too."""
INK, FAINT, GRID, GOOD, BAD, WARN, BASELINE = [
    PALETTE[name][0] for name in ("ink", "faint", "grid", "good", "bad", "warn", "baseline")
]
SERIES = tuple(light for name, (light, _) in PALETTE.items() if name.startswith("series"))
CANDIDATE = SERIES[0]
_GROUNDS = ("#ffffff", "#18202b")
"""Of a file of its own, light and dark."""
WIDTH = 4.8
"""Inches of a picture in the documents: on a phone its words are as large as they are drawn."""
_PIXELS = 1.4
"""Of a file of its own, for each unit: so wide it is shown where there is room."""
_SIDE = 0.1
"""Inches left free at each side: fonts of a browser may be wider than those that were measured."""
_IDS = "figure|axes|patch|line2d|text|legend|matplotlib|xtick|ytick|[A-Z][A-Za-z]*Collection"
"""Ids that matplotlib gives to groups: the same in every figure, and used by nothing."""
_FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_STYLE: Any = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10.0,
    "axes.edgecolor": GRID,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0.0,
    "ytick.major.size": 0.0,
    "xtick.minor.size": 0.0,
    "ytick.minor.size": 0.0,
    "text.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "figure.dpi": 100.0,
}


@contextmanager
def house_style() -> Iterator[None]:
    """Draw inside; matplotlib's own settings come back afterwards."""
    with mpl.rc_context(_STYLE):
        yield


def empty_figure(width: float, height: float) -> Figure:
    """A figure without axes; inches."""
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=_SIDE))


def new_figure(width: float = 6.4, height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure with one set of axes; inches."""
    figure = empty_figure(width, height)
    return figure, figure.subplots()


def limit_lines(axes: Axes, limits: Iterable[tuple[float, str, str]]) -> None:
    """Upright lines: where, in which colour, and what stands above the axes."""
    for limit, colour, name in limits:
        axes.axvline(limit, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(name, (limit, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(0, 3), textcoords="offset points", color=colour, ha="center",
                      fontsize=9, annotation_clip=False)  # fmt: skip


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    """Rows of a chart, the first on top."""
    axes.set_yticks(range(len(names)), list(reversed(names)))
    axes.set_ylim(-0.6, len(names) - 0.3)
    axes.grid(axis="y", visible=False)


def band(axes: Axes, values: Sequence[float], ratios: Sequence[Interval], colour: str) -> None:
    """The intervals along a line, where all are known."""
    ends = np.array([[ratio.low, ratio.high] for ratio in ratios])
    if np.isfinite(ends).all():
        axes.fill_between(values, ends[:, 0], ends[:, 1], color=colour, alpha=0.14, linewidth=0)


def draw_gain(axes: Axes, row: int, gain: ArmGain, right: float) -> None:
    """A row of a gain; an interval that goes on beyond `right` is cut there, with an arrow."""
    ratio = gain.ratio
    if not ratio.known or not gain.enough:
        axes.plot(ratio.estimate, row, "o", mfc="none", color=FAINT)
        axes.annotate(f"{ratio.estimate:.2f}x?", (ratio.estimate, row), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      color=FAINT)  # fmt: skip
        return
    colour = GOOD if ratio.low >= 1 else (BAD if ratio.high < 1 else WARN)
    end = min(ratio.high, right)
    if end < ratio.high:
        axes.plot(end, row, ">", color=colour, markersize=5)
    axes.plot([ratio.low, end], [row, row], color=colour, linewidth=2.4,
              solid_capstyle="round")  # fmt: skip
    axes.plot(ratio.estimate, row, "o", color=colour, markersize=6)
    axes.annotate(f"{ratio.estimate:.2f}x", (end, row), xytext=(7, 0),
                  textcoords="offset points", va="center", fontsize=9)  # fmt: skip


def gain_rows(
    rows: Sequence[tuple[str, ArmGain]], height: float, label: str, right: float | None = None
) -> Figure:
    """Named gains with their intervals, the first on top.

    Args:
        rows: name and gain of each row.
        height: of the figure, in inches.
        label: what the axis says.
        right: where intervals are cut; None: a little beyond the largest gain.
    """
    figure, axes = new_figure(height=height)
    if right is None:
        right = max(1.35, 1.25 * max(gain.ratio.estimate for _, gain in rows))
    for row, (_, gain) in enumerate(reversed(rows)):
        draw_gain(axes, row, gain, right)
    name_rows(axes, [name for name, _ in rows])
    limit_lines(axes, ((1.0, BAD, "1.0x"), (WORTH_IT, GOOD, f"{WORTH_IT:.1f}x")))
    axes.set_xlabel(label)
    return figure


def plain_log(axis: Axis, subs: tuple[int, ...] = (1, 2, 5)) -> None:
    """A logarithmic axis that writes 20 and 500, not powers of ten."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a line by its number, from 0: no two have all three alike."""
    turn = number // len(SERIES)
    dashes = ("-", (0, (4, 2)), (0, (1, 2)))[turn % 3]
    return {"color": SERIES[number % len(SERIES)], "marker": "osD^v"[turn % 5], "linestyle": dashes}


def variables(*, dark: bool) -> str:
    """The palette as declarations of CSS variables."""
    return " ".join(f"--{name}: {both[dark]};" for name, both in PALETTE.items())


def as_svg(figure: Figure, name: str) -> str:
    """The `<svg>` element, to be put into a page that declares `variables`; `name` keeps its ids
    apart from others'."""
    text = _transparent(figure, name)
    for variable, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{variable})")
    return text


def as_image(figure: Figure, name: str) -> str:
    """The `<svg>` element as a file of its own, on a ground that goes with its colours: light, or
    dark in a dark scheme. A page whose scheme is not the reader's cannot make it unreadable."""
    text = _transparent(figure, name).replace("</style>", f"{_in_the_dark()}</style>", 1)
    width, height = (_PIXELS * 72 * inches for inches in figure.get_size_inches())
    opened = f'<svg width="{width:.0f}" height="{height:.0f}" '
    ground = f'<rect class="ground" width="100%" height="100%" fill="{_GROUNDS[0]}"/>'
    return re.sub(r"^<svg ([^>]*>)", lambda tag: f"{opened}{tag[1]}\n {ground}", text, count=1)


def _in_the_dark() -> str:
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in PALETTE.values()
        for what in ("fill", "stroke")
    ]
    rules.append(f".ground {{ fill: {_GROUNDS[1]} }}")
    return "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"


def _transparent(figure: Figure, name: str) -> str:
    """The `<svg>` element in the light colours, as wide as there is room."""
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(rf'\bid="(?:{_IDS})[^"]*"', "", text)
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", _FONTS, text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)
