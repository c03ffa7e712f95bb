"""The one place that decides how many drafts a sequence may have in a step.

The scheduler is given a policy's `budget` and afterwards only clips its answers by what the
request, the step and the pages allow. 0 for every sequence means that the drafter does not run.
"""

from abc import ABC, abstractmethod
from typing import final

from foretoken.runtime.drafting import StepLoad
from foretoken.runtime.sequence import Sequence


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
