"""How far to draft, chosen by measurement: whatever took the least time per token at this load.

For each load (running sequences, by powers of two) a few draft lengths, 0 among them, are tried in
turn; the one with the least measured seconds per token and sequence is then used, the others are
tried again ever more rarely. It decides on times alone, so it never changes what is written.
Invariants: no draft at a load that was not measured yet, nor where drafting is not clearly faster.
"""

from dataclasses import dataclass, field
from typing import final

from foretoken.control.cost import TRIAL_STEPS, TokenCost
from foretoken.control.plan import DraftPlan, StepLoad
from foretoken.types import StepStats

RETRY = 48
"""Steps before the first new trial; doubled by each that confirms the choice."""
_RETRY_MOST = 192
"""Most steps between trials where one sequence runs; doubled with the load, up to eight times."""
_MARGIN = 0.97
"""Drafting has to take less than this share of the time without it."""


@dataclass(slots=True)
class _Load:
    """What is known at one load, and what is being tried."""

    costs: dict[int, TokenCost]
    length: int = 0
    """In force, trials aside."""
    trial: int | None = None
    left: int = 0
    """Steps of the trial that are still to be measured."""
    since: int = 0
    retry: int = RETRY
    retry_most: int = _RETRY_MOST
    turn: int = 0
    untried: list[int] = field(default_factory=list)

    def now(self) -> int:
        return self.length if self.trial is None else self.trial

    def add(self, seconds: float, tokens: float) -> None:
        """A step of the length `now` took so long."""
        # In the first step of a trial drafters catch up with what was written while they rested:
        # it says nothing about the steps that follow.
        if self.trial is not None and self.left > TRIAL_STEPS:
            self.left -= 1
            return
        self.costs[self.now()].observe(seconds, tokens)
        if self.trial is None:
            self.since += 1
        else:
            self.left -= 1
            self.trial = self.trial if self.left else None
        if self.trial is None:
            self._decide()

    def ms_per_token(self) -> dict[int, float]:
        """By length, of those that were measured."""
        return {k: 1e3 * cost.per_token for k, cost in list(self.costs.items()) if cost.tokens}

    def _decide(self) -> None:
        if self.untried:
            self._try(self.untried.pop(0))
            return
        best = self._best()
        if best != self.length:
            self.length, self.retry, self.since = best, RETRY, 0
        elif self.since >= self.retry:
            others = [length for length in self.costs if length != self.length]
            self.turn += 1
            self.since, self.retry = 0, min(2 * self.retry, self.retry_most)
            self._try(others[self.turn % len(others)])

    def _try(self, length: int) -> None:
        self.costs[length].doubt()
        self.trial, self.left = length, TRIAL_STEPS + 1

    def _best(self) -> int:
        plain = self.costs[0].per_token
        length = min(self.costs, key=lambda k: self.costs[k].per_token)
        return length if self.costs[length].per_token < _MARGIN * plain else 0


@final
class MeasuredLimit:
    """Most drafts of any sequence in a step, from what the steps before it took."""

    def __init__(self, most: int) -> None:
        """Try no drafts, `most`, and half as many."""
        assert most >= 1, most
        self._lengths = sorted({0, most // 2, most})
        self._loads: dict[int, _Load] = {}

    def at(self, load: StepLoad) -> int:
        """Most drafts in a step of this load."""
        return self._find(load).now()

    def observe(self, plan: DraftPlan, stats: StepStats) -> None:
        """Learn from a step: not from one that reads prompts, nor where nobody wanted drafts."""
        if plan.limit is None or stats.num_prefilled > 0 or stats.num_sampled == 0:
            return
        self._find(plan.load).add(stats.busy_s, stats.num_output_tokens / stats.num_sampled)

    def describe(self) -> list[dict[str, object]]:
        """For each load that was seen: the length in force, milliseconds per token of each."""
        return [
            {
                "sequences": _sizes(power),
                "num_speculative_tokens": load.length,
                "ms_per_token": {str(k): round(ms, 3) for k, ms in load.ms_per_token().items()},
            }
            for power, load in sorted(self._loads.items())
        ]

    def explained(self, load: StepLoad) -> tuple[int, dict[int, float], str]:
        """At this load: the length in force, milliseconds per token of each length that was
        tried, and the load in words."""
        found = self._loads.get(_power(load))
        drafts, costs = (0, {}) if found is None else (found.now(), found.ms_per_token())
        return drafts, costs, _sizes(_power(load))

    def _find(self, load: StepLoad) -> _Load:
        power = _power(load)
        found = self._loads.get(power)
        if found is None:
            costs = {length: TokenCost() for length in self._lengths}
            found = self._loads[power] = _Load(
                costs,
                untried=[k for k in self._lengths if k],
                retry_most=_RETRY_MOST << min(power, 3),
            )
            found._try(0)
        return found


def _power(load: StepLoad) -> int:
    """The power of two up to which loads are taken together with this one."""
    return (load.num_running - 1).bit_length()


def _sizes(power: int) -> str:
    return f"{(1 << power) // 2 + 1} to {1 << power}" if power else "1"
