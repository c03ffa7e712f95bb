"""Finding out what cannot be known otherwise, for a share of the time.

Trials are steps that do what the plan would not have done: a drafter at rest drafts for some
sequences, or a step is left plain to see what one takes. Each is charged what it cost beyond the
plain steps that the same tokens would have taken, so that one which pays costs nothing. A drafter
that is known not to pay is tried rarely, by one sequence; one of which little is known, or that
surprises, by several. The account is never overdrawn by more than one trial.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from foretoken.control.adaptive.allocation import Allocation, Counts, DraftOption
from foretoken.control.adaptive.allocation_inputs import AllocationInputs, DrafterView
from foretoken.control.adaptive.drafter import DrafterState

PLAIN = "plain"
"""The trial in which nobody drafts."""
TRIAL_SHARE = 0.01
"""Of all time, for trials."""
_MOST = 20.0
"""Plain steps that the account holds at most."""
_CREDIT = 8.0
"""Plain steps for each drafter at the start, before anything is earned."""
_IN_TURN = 3
"""Steps of a trial without drafts or of all sequences. What the first takes is not learnt: in a
server it takes up to half as much again, for the change."""
_FULL_EVERY = 6
"""Of so many trials one is of all sequences, with a draft each, if the drafter was not in use
lately: without that, a drafter that once seemed too dear would seem so for ever."""
_ALONE_STEPS = 8
"""Steps of a trial by a sequence alone that is read for longer than a plain step: nobody waits for
it, so it may be, and then it is worth more than one look."""
_SEVERAL = 4
"""Sequences of a trial of which the outcome is not known."""
_KNOWN = 24
"""Drafts of a class from which on it is known."""
_SURPRISING = 1.5
"""Evidence that a class rose, in nats, from which on the next trial follows at once."""
_HOPE = 0.95
"""A drafter that does not pay even at this chance of each draft is not tried."""
_PLAIN_SHARE = 0.0025
"""Of all time, for steps that are left plain: where drafts bring little, one knows well what plain
steps take, and where they bring much, one step in two hundred tells enough."""
_PLAIN_AGAIN = 8
"""Steps with drafts after which some are left plain, at the least."""


@final
class Account:
    """Seconds that are left for trials."""

    __slots__ = ("_drafters", "_opened", "balance_s", "spent_s", "steps_since_plain")

    def __init__(self, num_drafters: int) -> None:
        self._drafters, self._opened = num_drafters, False
        self.balance_s = 0.0
        self.spent_s = 0.0
        """All that trials cost so far."""
        self.steps_since_plain = 0
        """Steps in turn in which somebody drafted."""

    def earn(self, seconds: float, plain_s: float) -> None:
        """Time went by; `plain_s` is what a plain step takes."""
        if not self._opened:
            self.balance_s, self._opened = _CREDIT * plain_s * self._drafters, True
        elif self.balance_s < _MOST * plain_s:
            self.balance_s += TRIAL_SHARE * seconds

    def charge(self, seconds: float) -> None:
        """A trial took so much longer than plain steps; less than 0: it was faster."""
        self.balance_s -= max(seconds, 0.0)
        self.spent_s += max(seconds, 0.0)


@final
@dataclass(frozen=True, slots=True)
class Trial:
    """A step that finds something out."""

    of: str
    """A drafter, or PLAIN."""
    found: Allocation
    options: list[DraftOption]
    """What the drafters of `found` are counted by."""
    steps: int = 1
    """Steps that it takes."""


def pick_trial(
    inputs: AllocationInputs,
    found: Allocation,
    options: list[DraftOption],
    views: list[DrafterView],
    drafters: Mapping[str, DrafterState],
    account: Account,
) -> Trial | None:
    """A trial that is due and can be paid; None: the plan `found` is carried out."""
    balance_s = account.balance_s
    # Where some are held back for others it is not for what drafts are believed to cost.
    is_held = found.unguarded > found.rate
    if account.steps_since_plain >= _PLAIN_AGAIN and found.lengths_N.any():
        lost_s = _IN_TURN * (inputs.plain_s - len(inputs.ids) / found.rate)
        earned_s = _PLAIN_SHARE * account.steps_since_plain * found.seconds
        if lost_s <= min(earned_s, balance_s):
            return Trial(PLAIN, inputs.best([]), [], _IN_TURN)
    alone = len(inputs.ids) == 1
    used = {options[i].name for i in found.drafter_N.tolist() if i >= 0}
    by_name = {option.name: option for option in options}
    unused = [view for view in views if view.name not in used and view.name in by_name]
    for view in sorted(unused, key=lambda view: -drafters[view.name].idle):
        drafter, option = drafters[view.name], by_name[view.name]
        if drafter.since_trial < drafter.spacing or not drafter.is_ready:
            continue
        if not inputs.could_pay(option, _HOPE):
            drafter.put_off()
            continue
        due = not drafter.num_trials % _FULL_EVERY and not drafter.hopes
        full = due and not is_held and inputs.pays_if_rows_are_free(option)
        chosen = _to_try(view, drafter, inputs, full=full)
        reading_s = [
            view.cost.feeding(int(missed), inputs.context)
            for missed in np.cumsum(view.missing_N[chosen])
        ]
        # A trial is over at once, and others wait while its sequences are read.
        most_s = balance_s if alone else 2.0 * inputs.plain_s
        chosen = chosen[: sum(seconds <= most_s for seconds in reading_s)]
        for size in range(len(chosen), 0, -1):
            # Two drafts of a sequence: the second shows how long a run of accepted ones gets.
            tried = inputs.trial(option, chosen[:size], 1 if full else 2)
            lost_s = tried.seconds - tried.tokens * inputs.plain_s / len(inputs.ids)
            looks = alone and reading_s[size - 1] > inputs.plain_s
            for steps in (_IN_TURN, 1) if full else (_ALONE_STEPS, 1) if looks else (1,):
                if reading_s[size - 1] + steps * lost_s <= balance_s:
                    tried = replace(tried, seconds=tried.seconds + reading_s[size - 1] / steps)
                    return Trial(view.name, tried, [option], steps)
    return None


def surprises(inputs: AllocationInputs, drafter: str) -> bool:
    """Whether trials of this drafter speak for better drafts than were known."""
    return max(inputs.acceptance.rises(inputs.classes, drafter)) >= _SURPRISING


def is_known(inputs: AllocationInputs, drafter: str) -> bool:
    """Whether a trial of this drafter can only show what was seen before."""
    return inputs.acceptance.seen(inputs.classes, drafter) >= _KNOWN


def _to_try(
    view: DrafterView, drafter: DrafterState, inputs: AllocationInputs, *, full: bool
) -> Counts:
    """Sequences of the next trial: those whose class surprised, and of which least has to be read,
    in turn."""
    may = np.flatnonzero(view.max_drafts_N)
    may = np.roll(may, -drafter.num_trials % len(may))
    rises_N = np.array(inputs.acceptance.rises(inputs.classes, view.name))[may] >= _SURPRISING
    found: Counts = may[np.lexsort((view.missing_N[may], ~rises_N))]
    if full:
        return found
    several = rises_N.any() or not is_known(inputs, view.name)
    return found[: _SEVERAL if several else 1]
