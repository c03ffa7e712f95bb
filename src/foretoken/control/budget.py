"""The one place that decides how many drafts a sequence may have in a step.

The scheduler is given a policy's `budget` and afterwards only clips its answers by what the
request, the step and the pages allow. 0 for every sequence means that the drafter does not run.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Protocol, final

from foretoken.control.live import LivePolicy
from foretoken.runtime.drafting import StepLoad
from foretoken.runtime.sequence import Sequence

PREDICTED_DRAFTS = 10
"""Most drafts from a prediction or a grammar where no drafter allows more: they cost nothing to
make."""


class BudgetPolicy(ABC):
    """How far to speculate; `budget` is a `foretoken.runtime.drafting.DraftBudget`."""

    @abstractmethod
    def budget(self, sequence: Sequence, load: StepLoad, /) -> int:
        """Most drafts of `sequence` in a step of this load; at least 0. Reads, never changes."""


@final
class FixedBudget(BudgetPolicy):
    """The same number for every sequence and step: num_speculative_tokens, or 0."""

    def __init__(self, num_drafts: int) -> None:
        """Always answer `num_drafts`; asserts that it is not negative."""
        assert num_drafts >= 0, num_drafts
        self.num_drafts = num_drafts

    def budget(self, sequence: Sequence, load: StepLoad, /) -> int:
        """`num_drafts`."""
        return self.num_drafts


class Limit(Protocol):
    """What the load leaves of the drafts of any sequence."""

    def at(self, load: StepLoad) -> int:
        """Most drafts of a sequence in a step of this load."""


@final
class LoadLimit:
    """Most drafts by the number of running sequences, prefilling ones included."""

    def __init__(self, ranges: Seq[tuple[int, int, int]]) -> None:
        """(first, last, drafts) in ascending order from 1; gaps keep what stands before them."""
        assert ranges and ranges[0][0] == 1, ranges
        self._firsts = [first for first, _, _ in ranges]
        self._drafts = [drafts for _, _, drafts in ranges]

    @classmethod
    def off_from(cls, size: int, most: int) -> "LoadLimit":
        """No drafts for `size` running sequences or more, else at most `most`."""
        return cls([(1, size - 1, most), (size, size, 0)])

    def at(self, load: StepLoad) -> int:
        """Most drafts of any sequence in a step of this load."""
        running = load.num_decoding + load.num_prefilling
        return self._drafts[max(bisect_right(self._firsts, running) - 1, 0)]


@final
class RequestBudget(BudgetPolicy):
    """What drafters allow, what the load leaves of it, what the operator and the request say."""

    def __init__(
        self,
        drafters: Mapping[str, int],
        limit: Limit | None = None,
        live: LivePolicy | None = None,
        *,
        limits_free: bool = True,
    ) -> None:
        """Most drafts of each drafter by name; `limit` and `live` for all.

        Without `limits_free`, requests with a prediction or a grammar are spared `limit`.
        """
        assert all(count >= 1 for count in drafters.values()), drafters
        self._limits_free = limits_free
        self._drafters = dict(drafters)
        self._most = max(drafters.values(), default=0)
        self._limit = limit
        self._live = live or LivePolicy()

    def budget(self, sequence: Sequence, load: StepLoad, /) -> int:
        """The least of them all."""
        own, live = sequence.request.params.own_policy, self._live.speculation
        if not live.enabled:
            return 0
        most = self._most if live.drafter is None else self._drafters[live.drafter]
        if own is not None:
            if not own.enabled:
                return 0
            if own.drafter is not None:
                named = live.drafter in (None, own.drafter)
                most = self._drafters.get(own.drafter, 0) if named else 0
        free = sequence.request.prediction_ids or sequence.request.params.structured is not None
        if free:
            most = max(most, PREDICTED_DRAFTS)
        if own is not None and own.num_speculative_tokens is not None:
            most = min(most, own.num_speculative_tokens)
        if live.num_speculative_tokens is not None:
            most = min(most, live.num_speculative_tokens)
        if self._limit is None or most == 0 or (free and not self._limits_free):
            return most
        return min(most, self._limit.at(load))
