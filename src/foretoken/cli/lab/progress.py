"""What a measuring command shows while it goes: a live bar on a terminal, plain lines elsewhere.

Writes to stderr only, so that --json stays alone on stdout.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from foretoken.lab.results import RequestRecord
from foretoken.lab.segments import Segment

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
        if not self._console.is_terminal:
            self._console.print(
                f"block {segment.block + 1}, {segment.arm.name}: {len(segment.items)} requests, "
                f"{segment.load}",
                soft_wrap=True,
            )
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(self._describe(segment), total=len(segment.items))

    def _describe(self, segment: Segment) -> str:
        pace = f", {1000 * sum(self._tpot) / len(self._tpot):.1f} ms/token" if self._tpot else ""
        errors = f", {self._errors} errors" if self._errors else ""
        return f"block {segment.block + 1} {segment.arm.name}{pace}{errors}"


@contextmanager
def live_view() -> Iterator[LiveView]:
    """A view for as long as a measurement lasts."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield LiveView(console, progress)
