"""What a policy over several drafters is, and the one that goes by their order."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import final

from foretoken.control.plan import DraftOutcome
from foretoken.proposers.choose.offers import Offer, StepOffers


class Policy(ABC):
    """Which of several drafters serves each span; decides on what is known before any draw."""

    @abstractmethod
    def fill(self, step: StepOffers, names: tuple[str, ...]) -> None:
        """Ask drafters of `names` for the spans that are open, and take what is best."""

    def fit(self, step: StepOffers, offers: Mapping[int, Offer]) -> Mapping[int, Offer]:
        """Of drafts that are certain or vouched for, those that the step carries: all of them."""
        return offers

    @abstractmethod
    def observe(self, outcomes: Seq[DraftOutcome]) -> None:
        """Learn what became of the drafts of a step."""

    @abstractmethod
    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""


@final
class FirstPolicy(Policy):
    """The first drafter in the list that has something to offer."""

    def fill(self, step: StepOffers, names: tuple[str, ...]) -> None:
        for name in names:
            still_open = step.open
            if not still_open:
                return
            step.take(step.ask(name, still_open))

    def observe(self, outcomes: Seq[DraftOutcome]) -> None:
        """Nothing is learnt."""

    def release(self, request_id: str) -> None:
        """Nothing is kept."""
