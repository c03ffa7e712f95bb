"""Pictures of the documents: their width and lines, and an SVG file that follows the scheme."""

import re
from typing import Any

from matplotlib.figure import Figure

from foretoken.lab.report import canvas

WIDTH = canvas.WIDTH
"""Inches of a picture."""
PALETTE = {
    **canvas.PALETTE,
    "series-2": ("#d77400", "#f0a63a"),
    "series-3": ("#129e71", "#1fd6a0"),
    "series-4": ("#c2559b", "#f3a6d6"),
    "series-5": ("#8e2a00", "#d9613a"),
    "series-6": ("#259bbf", "#8fe0ff"),
    "series-7": ("#3d1e55", "#6f5bd6"),
}
"""On a light and on a dark ground. The series are told apart without seeing red or green, too."""
SERIES = (canvas.CANDIDATE, *(PALETTE[f"series-{number}"][0] for number in range(2, 8)))
GROUNDS = ("#ffffff", "#18202b")
"""Light and dark."""
_PIXELS = 1.4
"""For each unit: so wide it is shown where there is room."""


def line_style(number: int) -> dict[str, Any]:
    """Colour, marker and dashes of a line by its number, from 0: no two have all three alike."""
    turn = number // len(SERIES)
    dashes = ("-", (0, (4, 2)), (0, (1, 2)))[turn % 3]
    return {"color": SERIES[number % len(SERIES)], "marker": "osD^v"[turn % 5], "linestyle": dashes}


def as_image(figure: Figure, name: str) -> str:
    """The `<svg>` element as a file of its own, on a ground that goes with its colours: light, or
    dark in a dark scheme. A page whose scheme is not the reader's cannot make it unreadable."""
    rules = [
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }}'
        for light, dark in PALETTE.values()
        for what in ("fill", "stroke")
    ]
    rules.append(f".ground {{ fill: {GROUNDS[1]} }}")
    dark = "\n@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}\n"
    text = canvas.bare_svg(figure, name).replace("</style>", f"{dark}</style>", 1)
    width, height = (_PIXELS * 72 * inches for inches in figure.get_size_inches())
    opened = f'<svg width="{width:.0f}" height="{height:.0f}" '
    ground = f'<rect class="ground" width="100%" height="100%" fill="{GROUNDS[0]}"/>'
    return re.sub(r"^<svg ([^>]*>)", lambda tag: f"{opened}{tag[1]}\n {ground}", text, count=1)
