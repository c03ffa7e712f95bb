"""How many drafts each sequence may have at most, by what users, operators and settings say.

Where nothing else decides, `RequestBudget.plan` is the plan of a step, asked by the scheduler,
which afterwards only clips the answers by what the request, the step and the pages allow. 0 for
every sequence means that no drafter runs. `AdaptiveControl` takes its caps from here.
"""

from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import final

from foretoken.control.plan import DecodingSequence, DraftPlan, StepLoad
from foretoken.types import DEFAULT_GUARD, Request, Speculation

PREDICTED_DRAFTS = 10
"""Most drafts from a prediction or a grammar where no drafter allows more: they cost nothing to
make."""


@final
class LoadLimit:
    """Most drafts by the number of running sequences, prefilling ones included."""

    def __init__(self, ranges: Seq[tuple[int, int, int]]) -> None:
        """(first, last, drafts) in ascending order from 1; gaps keep what stands before them."""
        assert ranges and ranges[0][0] == 1, ranges
        self._firsts = [first for first, _, _ in ranges]
        self._drafts = [drafts for _, _, drafts in ranges]

    @classmethod
    def off_from(cls, size: int, max_drafts: int) -> "LoadLimit":
        """No drafts for `size` running sequences or more, else at most `max_drafts`."""
        return cls([(1, size - 1, max_drafts), (size, size, 0)])

    def at(self, load: StepLoad) -> int:
        """Most drafts of any sequence in a step of this load."""
        return self._drafts[max(bisect_right(self._firsts, load.num_running) - 1, 0)]


@final
class LivePolicy:
    """What an operator may change while the engine runs: a policy for all requests at once.

    It only narrows what the engine was configured with, and holds from the next step on. Budgets
    and drafters read it, `Engine.set_speculation` writes it.
    """

    def __init__(self) -> None:
        """Leave everything as configured."""
        self.speculation = Speculation()


@final
class RequestBudget:
    """What drafters allow, what the load leaves of it, what the operator and the request say.

    `plan` is a `foretoken.control.plan.DraftPlanner`.
    """

    def __init__(
        self,
        drafters: Mapping[str, int],
        limit: LoadLimit | None = None,
        live: LivePolicy | None = None,
    ) -> None:
        """Most drafts of each drafter by name; `limit` and `live` for all."""
        assert all(count >= 1 for count in drafters.values()), drafters
        self._drafters = dict(drafters)
        self._most = max(drafters.values(), default=0)
        self._limit = limit
        self._live = live or LivePolicy()

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """For each sequence the least of what all of them say."""
        limit: int | None = None
        budgets = []
        for sequence in sequences:
            max_drafts, _ = self.wanted(sequence.request)
            if max_drafts and self._limit is not None:
                limit = self._limit.at(load) if limit is None else limit
                max_drafts = min(max_drafts, limit)
            budgets.append(max_drafts)
        wanted = limit is not None or any(budgets)
        return DraftPlan(load=load, budgets=tuple(budgets), limit=limit, wanted=wanted)

    def allowed(self, request: Request, drafter: str) -> int:
        """Most drafts of this drafter for a request, load aside; 0: it may not draft for it."""
        own, live = request.params.own_policy, self._live.speculation
        if not live.enabled or live.drafter not in (None, drafter):
            return 0
        max_drafts = self._drafters[drafter]
        if live.num_speculative_tokens is not None:
            max_drafts = min(max_drafts, live.num_speculative_tokens)
        if own is None:
            return max_drafts
        if not own.enabled or own.drafter not in (None, drafter):
            return 0
        if own.num_speculative_tokens is not None:
            max_drafts = min(max_drafts, own.num_speculative_tokens)
        return max_drafts

    def guard(self, request: Request) -> float:
        """Share of its time without speculation that drafts may cost this request."""
        own = request.params.own_policy
        for policy in (own, self._live.speculation):
            if policy is not None and policy.guard is not None:
                return policy.guard
        return DEFAULT_GUARD

    @property
    def operator(self) -> Speculation:
        """What the operator leaves of everything now."""
        return self._live.speculation

    def wanted(self, request: Request) -> tuple[int, bool]:
        """Most drafts of a request, load aside; and whether it brings drafts that cost nothing."""
        own, live = request.params.own_policy, self._live.speculation
        if not live.enabled:
            return 0, False
        max_drafts = self._most if live.drafter is None else self._drafters[live.drafter]
        if own is not None:
            if not own.enabled:
                return 0, False
            if own.drafter is not None:
                named = live.drafter in (None, own.drafter)
                max_drafts = self._drafters.get(own.drafter, 0) if named else 0
        free = request.brings_drafts
        if free:
            max_drafts = max(max_drafts, PREDICTED_DRAFTS)
        if own is not None and own.num_speculative_tokens is not None:
            max_drafts = min(max_drafts, own.num_speculative_tokens)
        if live.num_speculative_tokens is not None:
            max_drafts = min(max_drafts, live.num_speculative_tokens)
        return max_drafts, free
