"""Whether the server has been told to stop, and until when what it accepted may go on."""

import time
from typing import final


@final
class Drain:
    """Begun by a signal or by a lost engine; a second signal ends the waiting."""

    def __init__(self, most_s: float) -> None:
        """What was accepted may go on for `most_s` after the beginning."""
        self._most_s = most_s
        self._until_s: float | None = None

    def __call__(self) -> bool:
        return self._until_s is not None

    def begin(self) -> None:
        """Begin; called again, there is no more waiting."""
        now_s = time.monotonic()
        self._until_s = now_s + self._most_s if self._until_s is None else now_s

    @property
    def is_over(self) -> bool:
        return self._until_s is not None and time.monotonic() >= self._until_s
