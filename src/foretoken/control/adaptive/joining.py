"""Requests that join a plan which was made for others: each does what most of its class do.

Knows what is kept of requests and drafters, and asks no search: to plan anew takes ten times as
long.
"""

from collections.abc import Mapping
from typing import final

import numpy as np

from foretoken.control.adaptive.active_plan import ActivePlan, PlannedDrafts
from foretoken.control.adaptive.allocation_inputs import RETURNS
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.guard import Ledger
from foretoken.control.adaptive.plan_assembly import CATCHING_UP
from foretoken.control.adaptive.tracked import TrackedRequest
from foretoken.control.budget import RequestBudget
from foretoken.control.learned.lengths import OutputLengths
from foretoken.control.learned.regression import Floats


@final
class Newcomers:
    """Has requests join plans."""

    def __init__(
        self,
        caps: RequestBudget,
        drafters: Mapping[str, DrafterState],
        ledger: Ledger,
        lengths: OutputLengths,
    ) -> None:
        """Know what users allow, the drafters by name, what requests gained, and how long answers
        are."""
        self._caps, self._drafters = caps, drafters
        self._ledger, self._lengths = ledger, lengths

    def join(self, active: ActivePlan, one: TrackedRequest, *, alone: bool = False) -> None:
        """A newcomer does what its class does, as far as it may. `alone`: nobody waits for it."""
        sequence, missing = one.sequence, 0
        request = sequence.request
        length, name, budget, surplus = active.usual(one.class_key)
        if name:
            allowed = self._caps.budget(request, name)
            length = max(min(length, allowed, request.max_tokens - sequence.num_output - 1), 0)
            missing = self._missing(one, name)
            if missing >= CATCHING_UP and not self._reading_pays(
                active, one, length, missing, name
            ):
                length = 0
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

    def _reading_pays(
        self, active: ActivePlan, one: TrackedRequest, length: int, missing: int, name: str
    ) -> bool:
        """Whether so many drafts a step bring back what it takes to read a newcomer first."""
        token_s = active.forecast.token_s / len(active.plan.budgets)
        gain_s = length * (active.row_brings * token_s - active.row_takes_s)
        feeding_s = self._drafters[name].cost.feeding(missing, active.context)
        steps = float(self._left_of(one)[0]) / (1.0 + min(active.row_brings, 1.0))
        return gain_s * steps >= RETURNS * feeding_s

    def _left_of(self, one: TrackedRequest) -> Floats:
        """Tokens that are expected of one request still, [1]."""
        sequence = one.sequence
        most = sequence.request.max_tokens - sequence.num_output
        written = np.array([sequence.num_output])
        return self._lengths.remaining([one.class_key], written, np.array([most]))
