"""The policies over several drafters: by their order, and the one of adaptive control.

The plan of a step says whose passes serve each span and how far, and what a second has to bring.
What can be had without a pass is looked at first: what stands in the text is known before anything
is drawn. It replaces a planned draft where it is expected to bring more at that price.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, final

from foretoken.control.acceptance import PromisedAcceptance
from foretoken.control.plan import DraftOutcome, DraftPlan, StepForecast
from foretoken.proposers.choose.offers import OWN, Offer, StepOffers

_LEARNS = 0.05
"""Share of a step in what asking a drafter brings."""
_ASKS_AGAIN = 16
"""Steps after which a drafter that brings nothing is asked again."""
_BEGINS = 8
"""Tokens of a request for which it is asked in any case: what one request repeats tells little of
the next."""


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


class _Worth(NamedTuple):
    """An offer at the price of its step."""

    offer: Offer
    surplus: float
    """Expected tokens beyond what its rows cost."""


class _Asking:
    """Whether asking a drafter that looks up has paid of late."""

    __slots__ = ("brings_s", "since", "takes_s")

    def __init__(self) -> None:
        self.brings_s = self.takes_s = 0.0
        self.since = 0

    def pays(self) -> bool:
        self.since += 1
        pays = self.brings_s >= self.takes_s or self.since >= _ASKS_AGAIN
        if pays:
            self.since = 0
        return pays

    def learn(self, brings_s: float, takes_s: float) -> None:
        self.brings_s += _LEARNS * (brings_s - self.brings_s)
        self.takes_s += _LEARNS * (takes_s - self.takes_s)


@final
class PlannedPolicy(Policy):
    """Does what the plan of the step says."""

    def __init__(self) -> None:
        self._acceptance = PromisedAcceptance()
        self._asking: dict[str, _Asking] = {}

    def fill(self, step: StepOffers, names: tuple[str, ...]) -> None:
        """Look up where it pays, then run the drafters of the plan."""
        plan = step.plan
        forecast = plan.forecast
        assert forecast is not None, "a planned step has a forecast"
        taken = self._look_up(step, names, plan, forecast)
        for name in dict.fromkeys(plan.drafters):
            if name and name in names:
                spans = range(len(plan.drafters))
                wanted = [i for i in spans if plan.drafters[i] == name and i not in taken]
                step.take(step.ask(name, wanted, plan.lengths))

    def fit(self, step: StepOffers, offers: Mapping[int, Offer]) -> dict[int, Offer]:
        """Of drafts that cost no pass those that the step has room for, the best first."""
        forecast = step.plan.forecast
        if forecast is None:
            return dict(offers)
        worth = {}
        for i, offer in offers.items():
            rows = len(offer.ids)
            expected = self._expected(step.request_id(i), offer)
            worth[i] = _Worth(offer, expected - forecast.price * forecast.row_s * rows)
        return self._within(worth, forecast.free_rows)

    def observe(self, outcomes: Seq[DraftOutcome]) -> None:
        for request_id, drafter, drafted, accepted, promise in outcomes:
            if drafter in self._asking or drafter in OWN:
                self._acceptance.begin(request_id)
                promised = min(float(drafted) if promise is None else promise, float(drafted))
                self._acceptance.observe(request_id, drafter, promised, accepted)

    def release(self, request_id: str) -> None:
        self._acceptance.release(request_id)

    def _look_up(
        self, step: StepOffers, names: tuple[str, ...], plan: DraftPlan, forecast: StepForecast
    ) -> set[int]:
        """Take what was found where it brings more than what is planned; the spans it is for."""
        indices = step.open
        if not indices or not forecast.free_rows:
            return set()
        best: dict[int, _Worth] = {}
        price_s = forecast.price * forecast.row_s
        for name in names:
            if not step.members[name].proposer.looks_up:
                continue
            asking = self._asking.setdefault(name, _Asking())
            asked = indices
            if not asking.pays():
                asked = [i for i in indices if step.spans[i].sequence.num_output <= _BEGINS]
                if not asked:
                    continue
            began = time.perf_counter()
            brought = 0.0
            for i, offer in step.ask(name, asked).items():
                expected = self._expected(step.request_id(i), offer)
                surplus = expected - price_s * len(offer.ids)
                planned = plan.surplus[i] if plan.surplus else 0.0
                if surplus > max(planned, 0.0) and (i not in best or surplus > best[i].surplus):
                    best[i] = _Worth(offer, surplus)
                    brought += surplus - max(planned, 0.0)
            asking.learn(brought / forecast.price, time.perf_counter() - began)
        chosen = self._within(best, forecast.free_rows)
        step.take(chosen)
        return set(chosen)

    def _expected(self, request_id: str, offer: Offer) -> float:
        rows = len(offer.ids)
        promise = float(rows) if offer.promise is None else offer.promise
        return self._acceptance.expected(request_id, offer.name, promise, rows)

    def _within(self, worth: Mapping[int, _Worth], rows: int) -> dict[int, Offer]:
        """The best of these that fit so many rows, each whole or not at all."""
        found = {}
        for i in sorted(worth, key=lambda i: -worth[i].surplus):
            offer, surplus = worth[i]
            if surplus > 0.0 and len(offer.ids) <= rows:
                found[i] = offer
                rows -= len(offer.ids)
        return found
