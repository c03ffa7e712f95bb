"""Tables of a plan that fit where they are shown. Computes no plan.

A terminal of 80 columns is the usual one. A table that is too wide for it is set as several, one
under the other, with its first column in each.
"""

from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

_BETWEEN = 2
"""Blanks from one column to the next."""


def make_table(title: str, *columns: str, left: int = 1) -> Table:
    """An empty table whose first columns are aligned left."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        first = index < left
        table.add_column(name, justify="left" if first else "right", no_wrap=first and left == 1)
    # A title is set as wide as its table: a narrow table gets the width of the title.
    table.min_width = cell_len(title) + _BETWEEN
    return table


def tables(
    title: str, header: Sequence[str], rows: Sequence[Sequence[str]], width: int
) -> Iterator[Table]:
    """The rows as one table or, where that takes more than `width` characters, as several of about
    as many columns each, with the first column in every one.

    Cells are markup; none is broken into lines as long as its column alone has room.
    """
    widths = [
        max(cell_len(Text.from_markup(cell).plain) for cell in column)
        for column in zip(header, *rows, strict=True)
    ]
    for number, part in enumerate(_parts(widths, width)):
        columns = [0, *part]
        named = title if not number else f"{title} (more)"
        table = make_table(named, *(header[i] for i in columns))
        table.min_width = min(table.min_width or 0, width)
        for column in table.columns:
            column.no_wrap = True
        for row in rows:
            table.add_row(*(row[i] for i in columns))
        yield table


def _parts(widths: Sequence[int], width: int) -> list[range]:
    """The columns after the first, in as few groups as fit, of about equal size."""
    last = len(widths)
    for count in range(1, last):
        size = -(-(last - 1) // count)
        groups = [range(i, min(i + size, last)) for i in range(1, last, size)]
        if all(_wide(widths, group) <= width for group in groups):
            return groups
    return [range(i, i + 1) for i in range(1, last)]


def _wide(widths: Sequence[int], columns: Sequence[int]) -> int:
    """Characters of a line with the first column and these."""
    return sum(widths[i] + _BETWEEN for i in (0, *columns))
