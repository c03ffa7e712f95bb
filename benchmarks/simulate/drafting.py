"""What drafters do in a simulated step: as the plan says, or one after the other where none does.

The counterpart of `proposers/choose` without tokens: forced tokens of a schema first, then what is
looked up where it brings more than what was planned, then the passes of the plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

from benchmarks.simulate.machine import SimulatedDrafter, SimulatedMachine
from benchmarks.simulate.traffic import SimulatedRequest
from foretoken.control.acceptance import PromisedAcceptance
from foretoken.control.plan import DraftPlan, Feed
from foretoken.types import DraftingTime

FORCED = "grammar"
"""Name under which tokens are drafted that a schema leaves no choice about."""


class DraftGuess(NamedTuple):
    """One sequence's draft, and how much of it is right."""

    drafter: str
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class DraftedStep:
    """What all drafters did in a step."""

    guesses: dict[int, DraftGuess]
    """By the place of the sequence among those that decode."""
    times: tuple[DraftingTime, ...]
    """Without noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """A sequence that decodes, and what it may draft."""

    sequence: Any
    simulated: SimulatedRequest
    budget: int


@dataclass(slots=True)
class _Offers:
    """What was taken so far in a step."""

    sequences: list[Decoding]
    guesses: dict[int, DraftGuess] = field(default_factory=dict)
    times: list[DraftingTime] = field(default_factory=list)

    @property
    def context(self) -> float:
        total = float(sum(one.sequence.num_tokens for one in self.sequences))
        return total / max(len(self.sequences), 1)


@final
class SimulatedDrafting:
    """All drafters of a machine, and what each has read."""

    def __init__(self, machine: SimulatedMachine) -> None:
        self._machine = machine
        self._read: dict[tuple[str, str], tuple[int, int]] = {}
        self._promised = PromisedAcceptance()

    def missing(self, drafter: str, sequence: Any) -> int:
        """Tokens of a sequence that the drafter would read before its first draft."""
        if not self._machine.drafter(drafter).reads:
            return 0
        preemptions, read = self._read.get((drafter, sequence.request.request_id), (0, 0))
        # A preempted sequence has new pages, in which nothing of the drafter stands.
        read = read if preemptions == sequence.num_preemptions else 0
        return int(sequence.num_tokens - read)

    def draft(self, plan: DraftPlan, sequences: list[Decoding]) -> DraftedStep:
        """The drafts of a step."""
        offers = _Offers(sequences)
        for name in dict.fromkeys(feed.drafter for feed in plan.feeds):
            feeds = [feed for feed in plan.feeds if feed.drafter == name]
            seconds = sum(self._feed(offers, feed) for feed in feeds)
            offers.times.append(DraftingTime(name, len(feeds), 0, 0, seconds))
        self._force(offers, plan)
        if plan.forecast is None:
            for one in self._machine.drafters:
                self._ask(offers, one, [s.budget for s in sequences])
        else:
            planned = self._look_up(offers, plan)
            for name in dict.fromkeys(plan.drafters):
                if name:
                    wanted = [
                        length if plan.drafters[i] == name and i not in planned else 0
                        for i, length in enumerate(plan.lengths)
                    ]
                    self._ask(offers, self._machine.drafter(name), wanted)
        return DraftedStep(offers.guesses, tuple(offers.times))

    def learn(self, outcomes: Mapping[str, DraftGuess]) -> None:
        """What became of what was looked up and forced."""
        for request_id, (drafter, drafted, accepted) in outcomes.items():
            if drafter == FORCED or self._machine.drafter(drafter).looks_up:
                self._promised.begin(request_id)
                self._promised.observe(request_id, drafter, float(drafted), accepted)

    def release(self, request_id: str) -> None:
        self._promised.release(request_id)
        for one in self._machine.drafters:
            self._read.pop((one.name, request_id), None)

    def _ask(self, offers: _Offers, one: SimulatedDrafter, wanted: list[int]) -> None:
        """One drafter drafts for all that have nothing yet."""
        lengths, fed, asked = [], 0, 0
        for place, (decoding, most) in enumerate(zip(offers.sequences, wanted, strict=True)):
            length = min(most, decoding.budget, one.max_drafts)
            if place in offers.guesses or length <= 0:
                continue
            asked += 1
            guess = self._guess(one, decoding, length)
            if guess is None:
                continue
            offers.guesses[place] = guess
            lengths.append(length)
            if one.reads:
                fed += max(self.missing(one.name, decoding.sequence) - length - 1, 0)
                self._note(one, decoding, decoding.sequence.num_tokens + guess.accepted)
        if asked:
            seconds = one.drafting_s(lengths, offers.context) if lengths else one.call_s
            seconds += one.reading_s(fed, offers.context)
            depth, total = max(lengths, default=0), sum(lengths)
            offers.times.append(DraftingTime(one.name, asked, depth, total, seconds))

    def _guess(self, one: SimulatedDrafter, decoding: Decoding, length: int) -> DraftGuess | None:
        done, simulated = decoding.sequence.num_output, decoding.simulated
        if one.looks_up and not simulated.finds(one.name, done):
            return None
        return DraftGuess(one.name, length, simulated.accepted(one.name, done, length))

    def _note(self, one: SimulatedDrafter, decoding: Decoding, read: int) -> None:
        sequence = decoding.sequence
        key = (one.name, sequence.request.request_id)
        self._read[key] = (sequence.num_preemptions, read)

    def _feed(self, offers: _Offers, feed: Feed) -> float:
        """Seconds of catching up with a sequence, as far as the plan says."""
        decoding, one = offers.sequences[feed.place], self._machine.drafter(feed.drafter)
        missing = self.missing(feed.drafter, decoding.sequence)
        # What lies before the window is never read.
        missing = missing if feed.window is None else min(missing, feed.window)
        rows = min(feed.rows, missing)
        self._note(one, decoding, decoding.sequence.num_tokens - missing + rows)
        return one.reading_s(rows, offers.context)

    def _force(self, offers: _Offers, plan: DraftPlan) -> None:
        """Take what a schema forces, the longest first where the step has little room."""
        found = {}
        for place, decoding in enumerate(offers.sequences):
            run = int(decoding.simulated.forced[decoding.sequence.num_output])
            length = min(run, decoding.budget)
            if length > 0:
                found[place] = DraftGuess(FORCED, length, length)
        self._take(offers, plan, found, {})

    def _look_up(self, offers: _Offers, plan: DraftPlan) -> set[int]:
        """Take what was found where it brings more than what is planned."""
        forecast = plan.forecast
        assert forecast is not None
        taken: set[int] = set()
        if not forecast.free_rows:
            return taken
        for one in self._machine.drafters:
            if not one.looks_up:
                continue
            found = {}
            for place, decoding in enumerate(offers.sequences):
                length = min(decoding.budget, one.max_drafts)
                if place not in offers.guesses and length > 0:
                    guess = self._guess(one, decoding, length)
                    if guess is not None:
                        found[place] = guess
            planned = dict(enumerate(plan.surplus))
            before = set(offers.guesses)
            self._take(offers, plan, found, planned)
            taken |= set(offers.guesses) - before
            depth = max((guess.drafted for guess in found.values()), default=0)
            rows = sum(guess.drafted for guess in found.values())
            timed = DraftingTime(one.name, len(offers.sequences), depth, rows, one.call_s)
            offers.times.append(timed)
        return taken

    def _take(
        self,
        offers: _Offers,
        plan: DraftPlan,
        found: dict[int, DraftGuess],
        planned: Mapping[int, float],
    ) -> None:
        """Those of these drafts that are worth their rows, the best first, each whole."""
        forecast = plan.forecast
        if forecast is None:
            offers.guesses.update(found)
            return
        worth = {}
        for place, guess in found.items():
            request_id = offers.sequences[place].sequence.request.request_id
            drafted = guess.drafted
            expected = self._promised.expected(request_id, guess.drafter, float(drafted), drafted)
            worth[place] = expected - forecast.price * forecast.row_s * drafted
        taken = [guess for guess in offers.guesses.values() if guess.drafter == FORCED]
        rows = forecast.free_rows - sum(guess.drafted for guess in taken)
        for place in sorted(worth, key=lambda place: -worth[place]):
            drafted = found[place].drafted
            if worth[place] > max(planned.get(place, 0.0), 0.0) and drafted <= rows:
                offers.guesses[place] = found[place]
                rows -= drafted
