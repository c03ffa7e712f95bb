"""Costs that were learnt while serving are kept for the next start, beside those timed at this one.

Owns when they are written: from time to time and at the end, never by the step that learnt them.
Knows no model. Nothing here is worth an error, and a process that is killed loses the last minute.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import final

from foretoken.control.learned.cost_file import CostFile, SavedCosts

_EVERY_S = 60.0
"""Seconds of steps after which costs are written again."""
_LEAST_S = 1.0
"""Seconds of steps that are worth writing at the end."""


@final
class CostKeeper:
    """Writes what one engine has learnt to its file."""

    def __init__(self, file: CostFile, known: Callable[[], SavedCosts]) -> None:
        """`known` gives what is known by now; asked between two steps."""
        self._file, self._known = file, known
        self._since_s = 0.0

    def passed(self, seconds: float) -> None:
        """A step took so long."""
        self._since_s += seconds
        if self._since_s >= _EVERY_S:
            self._since_s = 0.0
            known = self._known()
            # A folder may lie on a slow network; no request waits for it.
            with suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._file.write, args=(known,), name="costs").start()

    def close(self) -> None:
        """Write what was learnt since; the engine is gone or about to be."""
        if self._since_s >= _LEAST_S:
            self._since_s = 0.0
            self._file.write(self._known())
