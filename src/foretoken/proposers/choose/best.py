"""The policy `best`: for each sequence the drafter that promises most accepted tokens per second.

What it weighs is known before anything is drawn: how much of each drafter's drafts was accepted
so far, in this sequence and overall; what drafting and verifying took; and drafts that were looked
up, which follow from committed text alone. A draft model is only run once it has won, and what it
then draws is taken as it is. Whether two drafters agree on a token never matters: choosing for
that would bias the output.

A step's drafts maximise tokens per second of the whole batch: with a step of T seconds that
becomes longer by x for every draft, a draft is worth its expected tokens minus x times the rate
that is reached, and the rate follows from the choice (Dinkelbach 1967).
"""

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple, final

from foretoken.control.acceptance import PromisedAcceptance
from foretoken.control.cost import PassCost, RowCost, StepShape
from foretoken.control.plan import DraftOutcome
from foretoken.proposers.choose.offers import Offer, StepOffers
from foretoken.proposers.choose.policy import Policy
from foretoken.types import StepStats

_ROUNDS = 3
_TRY_AGAIN = 80
"""A drafter that was not used for so many drafts is, once, to stay informed."""
_NO_OFFER = Offer("", (), None, None)


class _Option(NamedTuple):
    """One way to serve a span."""

    name: str
    tokens: float
    """Expected to be accepted."""
    seconds: float
    """That the step becomes longer."""
    offer: Offer | None
    """None: the drafter has yet to be asked."""


_NOTHING = _Option("", 0.0, 0.0, _NO_OFFER)


@final
class BestPolicy(Policy):
    """Most accepted tokens per second."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._cost = RowCost()
        self._acceptance = PromisedAcceptance()
        self._drafting: defaultdict[str, PassCost] = defaultdict(PassCost)
        """Seconds of drafting for one sequence, by model."""
        self._idle: defaultdict[str, int] = defaultdict(int)
        """Drafts of others since each drafter was last used where it could have been."""
        self._looks_up: dict[str, bool] = {}

    def fill(self, step: StepOffers, names: tuple[str, ...]) -> None:
        """Look up first, then run the models that win."""
        indices = step.open
        if not indices:
            return
        options: dict[int, list[_Option]] = {i: [] for i in indices}
        models, row_s = [], self._cost.row_seconds()
        for name in names:
            looks_up = self._looks_up[name] = step.members[name].proposer.looks_up
            if looks_up:
                for i, offer in step.ask(name, indices).items():
                    options[i].append(self._looked_up(name, offer, row_s, step.request_id(i)))
            else:
                models.append(name)
                for i in indices:
                    if step.allowed(name, i):
                        options[i].append(self._modelled(name, row_s, step, i))
        chosen = self._choose(options, len(step.spans))
        chosen = {i: self._varied(i, one, options, step) for i, one in chosen.items()}
        for name in models:
            self._run(name, step, chosen, options)
        for i, one in chosen.items():
            if one.offer is not None and one.offer.ids:
                step.take({i: one.offer})

    def observe(self, outcomes: Seq[DraftOutcome], stats: StepStats) -> None:
        """Learn what a step took and what was accepted."""
        if not stats.num_prefilled:
            shape = StepShape(rows=stats.num_tokens)
            self._cost.observe(shape, stats.busy_s - stats.drafting_s)
        for request_id, drafter, drafted, accepted, promise, _ in outcomes:
            looks_up = self._looks_up.get(drafter)
            if looks_up is None:  # a prediction or a grammar: nobody chose it
                continue
            # A model's own confidences were not known when it was chosen, so that they are not
            # what it is measured by: it is taken to promise every draft.
            promised = float(drafted) if promise is None or not looks_up else promise
            promised = min(promised, float(drafted))
            self._acceptance.observe(request_id, drafter, promised, accepted)

    def release(self, request_id: str) -> None:
        """Forget what was known about a request."""
        self._acceptance.release(request_id)

    def _looked_up(self, name: str, offer: Offer, row_s: float, request_id: str) -> _Option:
        rows = len(offer.ids)
        promise = float(rows) if offer.promise is None else offer.promise
        tokens = self._acceptance.expected(request_id, name, promise, rows)
        return _Option(name, tokens, row_s * rows, offer)

    def _modelled(self, name: str, row_s: float, step: StepOffers, index: int) -> _Option:
        rows = min(step.spans[index].draft_budget, step.members[name].most)
        request_id = step.request_id(index)
        tokens = self._acceptance.expected(request_id, name, float(rows), rows)
        return _Option(name, tokens, row_s * rows + self._drafting[name].seconds, None)

    def _choose(self, options: Mapping[int, list[_Option]], num_spans: int) -> dict[int, _Option]:
        """The options that together give most tokens per second."""
        step_s = self._cost.seconds(StepShape(rows=num_spans)).seconds
        rate = num_spans / step_s
        chosen: dict[int, _Option] = {}
        for _ in range(_ROUNDS):
            tokens, seconds = float(num_spans), step_s
            for i, several in options.items():
                best, gain = _NOTHING, 0.0
                for one in several:
                    own = one.tokens - rate * one.seconds
                    if own > gain:
                        best, gain = one, own
                chosen[i] = best
                tokens += best.tokens
                seconds += best.seconds
            rate = tokens / seconds
        return chosen

    def _varied(
        self, index: int, best: _Option, options: Mapping[int, list[_Option]], step: StepOffers
    ) -> _Option:
        """The best option, or one that was not tried for long."""
        self._acceptance.begin(step.request_id(index))
        found, most = best, -1.0
        for one in options[index]:
            if self._idle[one.name] >= _TRY_AGAIN and one.tokens > most:
                found, most = one, one.tokens
            self._idle[one.name] += 1
        self._idle[found.name] = 0
        return found

    def _run(
        self,
        name: str,
        step: StepOffers,
        chosen: dict[int, _Option],
        options: Mapping[int, list[_Option]],
    ) -> None:
        """Ask a model for the spans that it won; where it has nothing, use what was looked up."""
        won = [i for i, one in chosen.items() if one.name == name]
        if not won:
            return
        usual = all(self._acceptance.knows(step.request_id(i), name) for i in won)
        offers = step.ask(name, won)
        took = step.times.get(name)
        if usual and took is not None:  # else it also had to read a prompt, which happens once
            self._drafting[name].observe(took.seconds / len(won))
        for i in won:
            if i in offers:
                step.take({i: offers[i]})
                chosen[i] = _NOTHING
            else:
                rest = [one for one in options[i] if one.offer is not None]
                chosen[i] = max(rest, key=lambda o: o.tokens, default=_NOTHING)
