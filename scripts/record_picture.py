"""Write docs/generate.svg: a run of `foretoken generate` as a terminal shows it, colours included.

The command runs in a pseudo-terminal; rich turns what it wrote into the picture. Nothing is drawn
that was not written: `text_of` reads the picture's words back for the test.
"""

import html
import os
import pty
import re
import sys
import tempfile
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

PICTURE = Path(__file__).parents[1] / "docs" / "generate.svg"
PROMPT = """class Queue:
    def __init__(self):
        self._items = []

    def __len__(self):"""
OPTIONS = ("--file", "waiting.py", "--max-tokens", "60")
COLUMNS, ADVANCE, DESCENT = 56, 12.2, 24.4  # of the picture; a character in its units
GROUND, INK = (41, 41, 41), (216, 219, 217)
THEME = TerminalTheme(
    GROUND,
    INK,
    [GROUND, (224, 108, 113), (152, 168, 75), (208, 179, 68), (106, 153, 196), (190, 147, 198),
     (104, 160, 179), INK],
)  # fmt: skip
"""Rich's own colours, those lighter that a phone does not show well."""
# Rich's form names fonts of a foreign host; ours names those that a reader has.
FORM = """\
<svg class="rich-terminal" width="640" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace;
  font-size: {char_height}px; line-height: {line_height}px }}
.{unique_id}-title {{ font-size: 18px; font-family: ui-sans-serif, system-ui, sans-serif }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def record() -> str:
    """What `foretoken generate` writes on a terminal, escape sequences included."""
    written = bytearray()

    def keep(descriptor: int) -> bytes:
        piece = os.read(descriptor, 4096)
        written.extend(piece)
        return b"." if piece else b""  # what pty.spawn shows in its place

    size = {"COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    home = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "waiting.py").write_text(PROMPT, "utf-8")
        os.chdir(folder)
        try:
            command = [sys.executable, "-m", "foretoken", "generate", *OPTIONS]
            status = pty.spawn(
                ["/usr/bin/env", *(f"{k}={v}" for k, v in size.items()), *command], keep
            )
        finally:
            os.chdir(home)
    output = written.decode().replace("\r\n", "\n")
    assert status == 0, output
    return output


def render(written: str) -> str:
    """The picture of terminal output, below the command that made it."""
    console = Console(file=StringIO(), record=True, width=COLUMNS, force_terminal=True)
    console.print(Text("$ foretoken generate " + " ".join(OPTIONS), style="bold"))
    console.print(Text.from_ansi(written.rstrip("\n")))
    return console.export_svg(
        title="foretoken", theme=THEME, code_format=FORM, unique_id="foretoken"
    )


def text_of(picture: str) -> list[str]:
    """The lines that a picture shows, the title left out."""
    lines: list[str] = []
    matrix = picture[picture.index('<g class="foretoken-matrix">') :]
    for x, y, words in re.findall(
        r'<text[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>(.*?)</text>', matrix
    ):
        row, column = int(float(y) / DESCENT), round(float(x) / ADVANCE)
        lines += [""] * (row + 1 - len(lines))
        lines[row] = lines[row].ljust(column) + html.unescape(words).replace("\xa0", " ")
    return [line.rstrip() for line in lines]


if __name__ == "__main__":
    PICTURE.write_text(render(record()), "utf-8")
    print(f"\nwrote {PICTURE}")
