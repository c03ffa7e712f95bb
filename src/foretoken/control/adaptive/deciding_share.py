"""What deciding takes of the time: while somebody may draft, and while nobody does.

The difference is part of what drafts cost, and no model of steps has it: plans that draft are made
more often, and the steps between them are booked one by one.
"""

import math
from typing import final

_FORGOTTEN_S = 4.0
"""Seconds of steps of a kind after which a third of what is known is older than that."""
_KNOWN_S = 0.2
"""Seconds of steps of either kind before their shares are compared."""


@final
class DecidingShare:
    """Seconds that deciding took, and seconds of the steps that it was part of."""

    __slots__ = ("_deciding_s", "_steps_s")

    def __init__(self) -> None:
        """Nothing known."""
        self._deciding_s, self._steps_s = [0.0, 0.0], [0.0, 0.0]

    def note(self, deciding_s: float, step_s: float, *, drafts: bool) -> None:
        """A step that took `step_s`, `deciding_s` of it for deciding, by a plan that drafts."""
        keeps = math.exp(-step_s / _FORGOTTEN_S)
        self._deciding_s[drafts] = keeps * self._deciding_s[drafts] + deciding_s
        self._steps_s[drafts] = keeps * self._steps_s[drafts] + step_s

    @property
    def of_drafts(self) -> float:
        """Share of the time that plans with drafts take beyond plans without."""
        if min(self._steps_s) < _KNOWN_S:
            return 0.0
        plain, drafted = (
            deciding_s / step_s
            for deciding_s, step_s in zip(self._deciding_s, self._steps_s, strict=True)
        )
        return max(drafted - plain, 0.0)
