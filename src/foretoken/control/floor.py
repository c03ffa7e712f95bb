"""`min_acceptance`: a drafter of which too little is kept rests, whatever else decides.

Looks at outcomes of past steps alone, so it never changes what is written. Knows neither times nor
requests. Invariant: a drafter that rests is tried again after a bounded number of steps.
"""

from collections.abc import Iterable
from typing import final

from foretoken.control.acceptance import RECENT_KEEPS
from foretoken.control.plan import DraftOutcome

JUDGED_FROM = 32
"""Draft tokens that must have been checked before a drafter is judged, and judged again."""
FIRST_REST = 64
"""Steps of the first rest; doubled by each trial that fails."""
LONGEST_REST = 1024


@final
class AcceptanceFloor:
    """Whether one drafter rests because too few of its drafts were accepted."""

    def __init__(self, least: float) -> None:
        """Rest below this share of accepted draft tokens; asserts that it is one."""
        assert 0.0 < least < 1.0, least
        self.least = least
        self._drafted = 0.0
        self._accepted = 0.0
        self._checked = 0
        """Draft tokens since it was last judged from nothing."""
        self._left = 0
        """Steps of the rest that are still to come."""
        self._rest = FIRST_REST

    @property
    def rests(self) -> bool:
        """Whether it is not to draft in the next step."""
        return self._left > 0

    @property
    def acceptance(self) -> float:
        """Accepted of recent draft tokens; 1 before there are any."""
        return self._accepted / self._drafted if self._drafted else 1.0

    def observe(self, drafter: str, outcomes: Iterable[DraftOutcome]) -> None:
        """Learn from a step of the engine; of its outcomes, those of `drafter` count."""
        if self._left:
            # The rest is over: what is known of before says nothing of now.
            self._left -= 1
            if not self._left:
                self._drafted = self._accepted = self._checked = 0
            return
        for one in outcomes:
            if one.drafter == drafter:
                self._drafted = RECENT_KEEPS * self._drafted + one.num_drafted
                self._accepted = RECENT_KEEPS * self._accepted + one.num_accepted
                self._checked += one.num_drafted
        if self._checked < JUDGED_FROM:
            return
        if self.acceptance < self.least:
            self._left, self._rest = self._rest, min(2 * self._rest, LONGEST_REST)
        else:
            self._rest = FIRST_REST
