"""How many drafts each sequence may have at most, by what users, operators and settings say.

Where nothing else decides, `RequestBudget.plan` is the plan of a step, asked by the scheduler,
which afterwards only lowers the answers to what is left of the output, the step and the pages. 0
for every sequence means that no drafter runs. `AdaptiveControl` asks `RequestBudget.budget` too, so
that nobody else knows what was wished for.
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
        self._max_drafts = dict(drafters)
        self._most = max(drafters.values(), default=0)
        self._limit = limit
        self._live = live or LivePolicy()

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """For each sequence the least of what all of them say."""
        budgets = [self.budget(sequence.request) for sequence in sequences]
        wanted = any(budgets)
        limit = self._limit.at(load) if wanted and self._limit is not None else None
        if limit is not None:
            budgets = [min(budget, limit) for budget in budgets]
        return DraftPlan(load=load, budgets=tuple(budgets), limit=limit, wanted=wanted)

    def budget(self, request: Request, drafter: str | None = None) -> int:
        """Most drafts of a request in a step by this drafter, or by any, those that it brings
        included: what the settings say, clipped by what the operator and the request want. Load
        aside."""
        most = self._most if drafter is None else self._max_drafts[drafter]
        brought = PREDICTED_DRAFTS if drafter is None and request.brings_drafts else 0
        for policy in (self._live.speculation, request.params.own_policy):
            if policy is None:
                continue
            if not policy.enabled:
                return 0
            if policy.drafter is not None:
                agrees = drafter in (None, policy.drafter)
                most = min(most, self._max_drafts.get(policy.drafter, 0)) if agrees else 0
                drafter = drafter or policy.drafter
            if policy.num_speculative_tokens is not None:
                most = min(most, policy.num_speculative_tokens)
                brought = min(brought, policy.num_speculative_tokens)
        return max(most, brought)

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
