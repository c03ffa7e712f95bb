"""Figures in the house style, as SVG: colours, fonts and sizes, and how a gain is drawn.

In a page every colour is a CSS variable, so that a figure follows what is around it. Fixed salts
make the output the same for the same data.
"""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from foretoken.lab.records.results import ArmGain
from foretoken.lab.verdict import WORTH_IT

PALETTE = {
    "ink": ("#1f2a37", "#e6ebf2"),
    "faint": ("#66717f", "#9aa6b6"),
    "grid": ("#e3e8ef", "#2c3644"),
    "good": ("#147a47", "#4cc38a"),
    "bad": ("#b93131", "#ff7b7b"),
    "warn": ("#a8650f", "#f0b357"),
    "baseline": ("#8a94a6", "#93a0b4"),
    "candidate": ("#0061c6", "#5c9ff5"),
}
"""Every colour on a light and on a dark ground, by its name in the page. Figures are drawn in the
light ones."""
INK, FAINT, GRID, GOOD, BAD, WARN, BASELINE, CANDIDATE = (light for light, _ in PALETTE.values())
WIDTH = 4.8
"""Inches of a picture: on a phone its words are as large as they are drawn."""
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


def new_figure(height: float = 3.4) -> tuple[Figure, Axes]:
    """A figure with one set of axes; inches."""
    figure = empty_figure(WIDTH, height)
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


def gain_rows(rows: Sequence[tuple[str, ArmGain]], label: str) -> Figure:
    """Named gains with their intervals, the first on top; `label` is the axis's. An interval that
    goes on far beyond the largest gain is cut, with an arrow. Hollow: too few requests for an
    interval."""
    figure, axes = new_figure(0.9 + 0.32 * len(rows))
    right = max(1.35, 1.25 * max(gain.ratio.estimate for _, gain in rows))
    for row, (_, gain) in enumerate(reversed(rows)):
        ratio = gain.ratio
        known = ratio.known and gain.enough
        colour = GOOD if ratio.low >= 1 else (BAD if ratio.high < 1 else WARN)
        end = min(ratio.high, right) if known else ratio.estimate
        if known:
            axes.plot([ratio.low, end], [row, row], color=colour, linewidth=2.4,
                      solid_capstyle="round")  # fmt: skip
            axes.plot(ratio.estimate, row, "o", color=colour, markersize=6)
        else:
            axes.plot(ratio.estimate, row, "o", mfc="none", color=FAINT)
        if known and end < ratio.high:
            axes.plot(end, row, ">", color=colour, markersize=5)
        axes.annotate(f"{ratio.estimate:.2f}x{'' if known else '?'}", (end, row), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      color=INK if known else FAINT)  # fmt: skip
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


def variables(*, dark: bool) -> str:
    return " ".join(f"--{name}: {both[dark]};" for name, both in PALETTE.items())


def as_svg(figure: Figure, name: str) -> str:
    """The `<svg>` element, to be put into a page that declares `variables`; `name` keeps its ids
    apart from others'."""
    text = bare_svg(figure, name)
    for variable, (light, _) in PALETTE.items():
        text = text.replace(light, f"var(--{variable})")
    return text


def bare_svg(figure: Figure, name: str) -> str:
    """The `<svg>` element in the light colours, on no ground, as wide as there is room."""
    buffer = io.StringIO()
    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(rf'\bid="(?:{_IDS})[^"]*"', "", text)
    text = re.sub(r"'DejaVu Sans'(, sans-serif)?", _FONTS, text)
    return re.sub(r'(<svg[^>]*?) width="[^"]*"| height="[^"]*pt"', r"\1", text, count=2)
