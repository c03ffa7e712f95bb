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

from collections.abc import Mapping
from typing import NamedTuple, final

from foretoken.proposers.choose.offers import Desk, Offer
from foretoken.proposers.policy import Policy
from foretoken.proposers.worth import Ratio, StepCost, StepOutcome, Trust

_ROUNDS = 3
_TRY_AGAIN = 80
"""A drafter that was not used for so many drafts is, once, to stay informed."""
_NO_OFFER = Offer("", (), None, None)


class _Option(NamedTuple):
    """One way to serve a span."""

    name: str
    promise: float
    tokens: float
    """Expected to be accepted."""
    seconds: float
    """That the step becomes longer."""
    offer: Offer | None
    """None: the drafter has yet to be asked."""


_NOTHING = _Option("", 0.0, 0.0, 0.0, _NO_OFFER)


class _Own:
    """What is known about one request."""

    __slots__ = ("last", "promise", "ratios")

    def __init__(self) -> None:
        self.ratios: dict[str, Ratio] = {}
        self.last = ""
        """The drafter of its last draft."""
        self.promise = 0.0


@final
class BestPolicy(Policy):
    """Most accepted tokens per second."""

    def __init__(self) -> None:
        """Nothing measured yet."""
        self._cost = StepCost()
        self._trust: dict[str, Trust] = {}
        self._own: dict[str, _Own] = {}

    def fill(self, desk: Desk, names: tuple[str, ...]) -> None:
        """Look up first, then run the models that win."""
        indices = desk.open
        if not indices:
            return
        options: dict[int, list[_Option]] = {i: [] for i in indices}
        models, row_s = [], self._cost.of_row()
        for name in names:
            if desk.members[name].proposer.looks_up:
                for i, offer in desk.ask(name, indices).items():
                    options[i].append(self._looked_up(name, offer, row_s, desk.request_id(i)))
            else:
                models.append(name)
                for i in indices:
                    if desk.allowed(name, i):
                        options[i].append(self._modelled(name, row_s, desk, i))
        chosen = self._choose(options, len(desk.spans))
        chosen = {i: self._varied(i, one, options, desk) for i, one in chosen.items()}
        for name in models:
            self._run(name, desk, chosen, options)
        for i, one in chosen.items():
            if one.offer is not None and one.offer.ids:
                self._take(desk, i, one, one.offer)

    def observe(self, outcome: StepOutcome) -> None:
        """Learn what the last step took and what was accepted."""
        if not outcome.num_prefilled:
            self._cost.add(outcome.num_rows, outcome.seconds)
        for request_id, drafter, accepted in outcome.drafts:
            own = self._own.get(request_id)
            if own is not None and own.last == drafter:
                ratio = own.ratios.setdefault(drafter, Ratio())
                self._of(drafter).add(own.promise, accepted, ratio)

    def release(self, request_id: str) -> None:
        """Forget what was known about a request."""
        self._own.pop(request_id, None)

    def _of(self, name: str) -> Trust:
        trust = self._trust.get(name)
        if trust is None:
            trust = self._trust[name] = Trust()
        return trust

    def _expected(self, name: str, promise: float, rows: int, request_id: str) -> float:
        """Tokens of `rows` drafts with that promise that will be accepted."""
        own = self._own.get(request_id)
        ratio = None if own is None else own.ratios.get(name)
        return min(self._of(name).expected(promise, ratio), float(rows))

    def _looked_up(self, name: str, offer: Offer, row_s: float, request_id: str) -> _Option:
        rows = len(offer.ids)
        promise = float(rows) if offer.promise is None else offer.promise
        tokens = self._expected(name, promise, rows, request_id)
        return _Option(name, promise, tokens, row_s * rows, offer)

    def _modelled(self, name: str, row_s: float, desk: Desk, index: int) -> _Option:
        rows = min(desk.spans[index].draft_budget, desk.members[name].most)
        tokens = self._expected(name, float(rows), rows, desk.request_id(index))
        return _Option(name, float(rows), tokens, row_s * rows + self._of(name).seconds, None)

    def _choose(self, options: Mapping[int, list[_Option]], num_spans: int) -> dict[int, _Option]:
        """The options that together give most tokens per second."""
        step_s = self._cost.of_step(num_spans)
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
        self, index: int, best: _Option, options: Mapping[int, list[_Option]], desk: Desk
    ) -> _Option:
        """The best option, or one that was not tried for long."""
        request_id = desk.request_id(index)
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = _Own()
        found, most = best, -1.0
        for one in options[index]:
            trust = self._of(one.name)
            if trust.idle >= _TRY_AGAIN and one.tokens > most:
                found, most = one, one.tokens
            trust.idle += 1
        self._of(found.name).idle = 0
        return found

    def _run(
        self,
        name: str,
        desk: Desk,
        chosen: dict[int, _Option],
        options: Mapping[int, list[_Option]],
    ) -> None:
        """Ask a model for the spans that it won; where it has nothing, use what was looked up."""
        won = [i for i, one in chosen.items() if one.name == name]
        if not won:
            return
        usual = all(name in self._own[desk.request_id(i)].ratios for i in won)
        before = desk.seconds.get(name, 0.0)
        offers = desk.ask(name, won)
        if usual:  # else it also had to read a prompt, which happens once
            self._of(name).add_seconds((desk.seconds.get(name, 0.0) - before) / len(won))
        for i in won:
            if i in offers:
                self._take(desk, i, chosen[i], offers[i])
                chosen[i] = _NOTHING
            else:
                rest = [one for one in options[i] if one.offer is not None]
                chosen[i] = max(rest, key=lambda o: o.tokens, default=_NOTHING)

    def _take(self, desk: Desk, index: int, option: _Option, offer: Offer) -> None:
        own = self._own[desk.request_id(index)]
        own.last = option.name
        own.promise = min(option.promise, float(len(offer.ids)))
        desk.take({index: offer})
