"""What a measuring command shows while it goes: a live bar on a terminal, plain lines elsewhere.

Writes to stderr only, so that --json stays alone on stdout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from foretoken.lab.measure.segments import Segment
from foretoken.lab.records.results import RequestRecord

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class LiveView:
    """Follows segments and requests."""

    def __init__(self, console: "Console", progress: "Progress") -> None:
        """Draw on `progress` if `console` is a terminal, else print lines."""
        self._console, self._progress = console, progress
        self._task: TaskID | None = None
        self._errors = 0
        self._tpot: list[float] = []
        self._left, self._begun, self._started_s = 0, 0, 0.0

    def expect(self, blocks: int, out: Path, arms: int) -> None:
        """Expect the segments, `arms` times `blocks`, that `out` does not have yet."""
        from foretoken.lab.measure.segments import read_segments

        self._left, self._begun = max(0, arms * blocks - len(read_segments(out))), 0

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, soft_wrap=True)

    def __call__(self, segment: Segment, record: RequestRecord | None) -> None:
        """A segment begins (None), or one of its requests has ended."""
        if record is None:
            self._begin(segment)
            return
        self._errors += not record.ok
        if record.tpot_s == record.tpot_s:
            self._tpot.append(record.tpot_s)
        if self._task is not None:
            self._progress.update(self._task, advance=1, description=self._describe(segment))

    def _begin(self, segment: Segment) -> None:
        self._errors, self._tpot = 0, []
        if self._begun == 0:
            self._started_s = monotonic()
        if not self._console.is_terminal:
            self._console.print(
                f"block {segment.block + 1}, {segment.arm.name}: {len(segment.items)} requests, "
                f"{segment.load}{self._estimate()}",
                soft_wrap=True,
            )
            self._begun += 1
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(self._describe(segment), total=len(segment.items))
        self._begun += 1

    def _estimate(self) -> str:
        """How long all the rest takes, by the pace so far."""
        left = self._left - self._begun
        if self._begun == 0 or left <= 0:
            return ""
        minutes = (monotonic() - self._started_s) / self._begun * left / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", under a minute left"

    def _describe(self, segment: Segment) -> str:
        pace = f", {1000 * sum(self._tpot) / len(self._tpot):.1f} ms/token" if self._tpot else ""
        errors = f", {self._errors} errors" if self._errors else ""
        left = self._estimate()
        return f"block {segment.block + 1} {segment.arm.name}{pace}{errors}{left}"


@contextmanager
def live_view() -> Iterator[LiveView]:
    """A view for as long as a measurement lasts."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield LiveView(console, progress)
