"""Requests that join a plan which was made for others: each does what most of its class do.

Knows what is kept of requests and drafters, and asks no search: to plan anew takes ten times as
long.
"""

from collections.abc import Mapping
from typing import final

from foretoken.control.adaptive.active_plan import ActivePlan, PlannedDrafts
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.guard import Ledger
from foretoken.control.adaptive.tracked import TrackedRequest
from foretoken.control.budget import RequestBudget


@final
class Newcomers:
    """Has requests join plans."""

    def __init__(
        self,
        caps: RequestBudget,
        drafters: Mapping[str, DrafterState],
        ledger: Ledger,
    ) -> None:
        """Know what users allow, the drafters by name, and what requests gained."""
        self._caps, self._drafters, self._ledger = caps, drafters, ledger

    def join(self, active: ActivePlan, one: TrackedRequest, *, alone: bool = False) -> None:
        """A newcomer does what its class does, as far as it may. `alone`: nobody waits for it."""
        sequence, missing = one.sequence, 0
        request = sequence.request
        length, name, budget, surplus = active.usual(one.class_key)
        if name:
            allowed = self._caps.budget(request, name)
            length = max(min(length, allowed, request.max_tokens - sequence.num_output - 1), 0)
            missing = self._missing(one, name)
        if budget:
            budget = min(budget, self._caps.budget(request))
        if not length:
            name = ""
        held = PlannedDrafts(length, name, max(budget, length), surplus)
        gained_s = self._ledger.gained(request.request_id)
        active.join(request.request_id, held, missing, gained_s=gained_s, alone=alone)

    def drafts_at_once(self, one: TrackedRequest, name: str) -> bool:
        """Whether the drafter, if there is one, can draft at once for a sequence that is alone,
        and would read no window of it."""
        if not name:
            return True
        drafter = self._drafters[name]
        window = drafter.facts.window
        return drafter.is_ready and (not window or self._missing(one, name) <= window)

    def _missing(self, one: TrackedRequest, name: str) -> int:
        """Tokens of the request that the drafter has not read."""
        return max(one.sequence.num_tokens - one.has_read(self._drafters[name].facts), 0)
