"""One drafter as control sees it: what is fixed, and what it did of late."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

from foretoken.control.adaptive.allocation import MARGIN
from foretoken.control.floor import AcceptanceFloor
from foretoken.control.learned.drafter_cost import DrafterCost

_BEGINNING = 0.05
"""What drafts have to bring where nobody drafts yet: what has not run for a while is slow at first,
and there is more to read."""
_RESTS_AFTER = 8
"""Steps without a draft after which a drafter rests."""
_SPACING, _SPACING_MOST = 4, 32
"""Steps between a trial that failed and the next, at first and at most."""
_SPACING_MOST_WITH_FEATURES = 256
"""The same for drafters that are only worth a trial after they were awake for some steps."""
_HOPES_MOST = 2048
"""Steps that a drafter which paid is tried often."""
_SHARE = 0.003
"""Of the time, for trials of a drafter that is known not to pay."""
_WINDOW = 128
"""Most of the latest tokens of a sequence that are read in place of all."""
_WAKES = 32
"""Tokens with features after which a head that rested drafts again."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterFacts:
    """What control has to know of one drafter."""

    name: str
    max_drafts: int
    """Drafts per sequence and step."""
    looks_up: bool = False
    """Whether it finds drafts in text, without a pass."""
    missing: Callable[[Any], int] = lambda _: 0
    """Tokens of a sequence that it would read before its first draft."""
    max_window: int = 0
    """Most of the latest tokens that it may take for a whole sequence; 0: it has to read all."""
    reads_features: bool = False
    """Whether it reads hidden states of the target, which nobody writes while it rests."""
    floor: AcceptanceFloor | None = None
    """Says when too little of it was accepted for it to be a choice at all; None: never."""

    @property
    def window(self) -> int:
        """The latest tokens that have to do where reading all of them does not pay; 0: it has to
        read all."""
        return min(_WINDOW, self.max_window)


@final
@dataclass(slots=True)
class DrafterState:
    """One drafter and what it did of late."""

    facts: DrafterFacts
    cost: DrafterCost
    idle: int = 0
    """Steps since it drafted for anybody."""
    since_trial: int = 0
    """Steps since its last trial."""
    spacing: int = 0
    """Steps between a trial and the next."""
    num_trials: int = 0
    awake: int = 1 << 30
    """Steps since it last rested."""
    hopes: int = 0
    """Steps for which it is still tried as often as one of which nothing is known: as many as it
    was used before."""

    @property
    def rests(self) -> bool:
        """Whether nobody needs what it keeps. It wakes in time for its next trial."""
        due = self.spacing - self.since_trial
        return self.idle >= _RESTS_AFTER and (not self.facts.reads_features or due > _WAKES)

    @property
    def is_ready(self) -> bool:
        """Whether it would know enough of sequences that ran while it rested."""
        return not self.facts.reads_features or self.awake >= _WAKES

    def learn_trial(self, lost_steps: float, *, surprising: bool, known: bool) -> None:
        """A trial took `lost_steps` plain steps more than it brought.

        One that is `surprising` is followed by the next at once, others ever more rarely: one that
        only shows what was `known` tells nothing, so that the more it took the later is the next.
        """
        self.since_trial = 0
        self.num_trials += 1
        spacing = min(max(2 * self.spacing, _SPACING), self._most_spacing)
        self.spacing = 0 if surprising else spacing
        if known and not surprising and not self.hopes:
            self.spacing = max(self.spacing, int(lost_steps / _SHARE))

    def pass_by(self, steps: int, *, used: bool, tried: bool, rested: bool) -> None:
        """A plan has held for so many steps, in which it was used, or only tried, or rested."""
        self.awake = 0 if rested else self.awake + steps
        self.idle = 0 if used else self.idle + steps
        paid = used and not tried
        self.hopes = (
            min(self.hopes + 4 * steps, _HOPES_MOST) if paid else max(self.hopes - steps, 0)
        )
        self.since_trial += steps

    def put_off(self) -> None:
        """No trial now, whatever would come of it: the drafter cannot pay."""
        self.since_trial, self.spacing = 0, max(self.spacing, self._most_spacing)

    @property
    def _most_spacing(self) -> int:
        return _SPACING_MOST_WITH_FEATURES if self.facts.reads_features else _SPACING_MOST


def least_gain(drafters: Iterable[DrafterState]) -> float:
    """Share of its tokens per second that a step has to gain by drafts."""
    return MARGIN if any(not one.idle for one in drafters) else _BEGINNING
