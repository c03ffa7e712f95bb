"""Finding out what cannot be known otherwise, for a share of the time.

Trials are steps that do what the plan would not have done: a drafter at rest drafts for some
sequences, or a step is left plain to see what one takes. Each is charged what it cost beyond the
plain steps that the same tokens would have taken, so that a trial which succeeds costs nothing and
is followed by a larger one at once. The account is never overdrawn by more than one trial.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from foretoken.control.adaptive.allocation import Allocation, Counts, DraftOption
from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.scene import DrafterView, Scene

PLAIN = "plain"
"""The trial in which nobody drafts."""
SHARE = 0.01
"""Of all time, for trials."""
_MOST = 20.0
"""Plain steps that the account holds at most."""
_CREDIT = 8.0
"""Plain steps for each drafter at the start, before anything is earned."""
_DRAFTS = 2
"""Drafts of a sequence in a trial."""
_READING = 2.0
"""Plain steps that a drafter may read before a trial: it is over at once, and others wait."""
_PLAIN_SHARE = 0.0025
"""Of all time, for steps that are left plain: where drafts bring little, one knows well what plain
steps take, and where they bring much, one step in two hundred tells enough."""
_PLAIN_AGAIN = 8
"""Steps with drafts after which one is left plain, at the least."""


@final
class Account:
    """Seconds that are left for trials."""

    __slots__ = ("_drafters", "_opened", "balance_s", "spent_s", "steps_since_plain")

    def __init__(self, num_drafters: int) -> None:
        """Nothing earned, nothing spent."""
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
            self.balance_s += SHARE * seconds

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


def pick_trial(
    scene: Scene,
    found: Allocation,
    options: list[DraftOption],
    views: list[DrafterView],
    drafters: Mapping[str, DrafterState],
    account: Account,
) -> Trial | None:
    """A trial that is due and can be paid; None: the plan `found` is carried out."""
    balance_s = account.balance_s
    if account.steps_since_plain >= _PLAIN_AGAIN and found.drafts_N.any():
        lost_s = scene.plain_s - len(scene.ids) / found.rate
        earned_s = _PLAIN_SHARE * account.steps_since_plain * found.seconds
        if lost_s <= min(earned_s, balance_s):
            return Trial(PLAIN, scene.best([]), [])
    used = {options[i].name for i in found.drafter_N.tolist() if i >= 0}
    by_name = {option.name: option for option in options}
    unused = [view for view in views if view.name not in used and view.name in by_name]
    for view in sorted(unused, key=lambda view: -drafters[view.name].idle):
        drafter = drafters[view.name]
        if drafter.since_trial < drafter.spacing or not drafter.is_ready:
            continue
        chosen = _to_try(view, drafter)
        reading_s = [
            view.cost.feeding(int(missed), scene.context)
            for missed in np.cumsum(view.missing_N[chosen])
        ]
        chosen = chosen[: sum(seconds <= _READING * scene.plain_s for seconds in reading_s)]
        if not len(chosen):
            continue
        tried = scene.trial(by_name[view.name], chosen, _DRAFTS)
        tried = replace(tried, seconds=tried.seconds + reading_s[len(chosen) - 1])
        # A larger trial follows one that succeeded: most of it is expected to come back.
        if (tried.seconds - scene.plain_s) / len(chosen) <= balance_s:
            return Trial(view.name, tried, [by_name[view.name]])
    return None


def _to_try(view: DrafterView, drafter: DrafterState) -> Counts:
    """Sequences of the next trial: those of which least has to be read, in turn."""
    may = np.flatnonzero(view.most_N)
    may = np.roll(may, -drafter.num_trials % len(may))
    least_missed: Counts = may[np.argsort(view.missing_N[may], kind="stable")]
    return least_missed[: drafter.tries]
