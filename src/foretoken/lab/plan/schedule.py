"""Drafts per verification by load: what the prediction would choose, what an engine can be told.

Engines take a list that may only fall as the load rises. A mixture of experts can want the
opposite: few rows touch many experts anew, many rows share them. So can a small target whose
drafter is bound by launches. Such a list is said as advice, and the number of the load that
decides is used throughout, as with an engine that takes one number. Foretoken finds its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.plan.predict import LoadPrediction, PlannedSpeed
from foretoken.lab.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSchedule:
    """What to draft at which load."""

    steps: tuple[tuple[int, int], ...]
    """(k, last number of requests in flight) by rising load; the last entry has no end (0)."""
    decided: int
    """At the load that decides the verdict, 0: off there; engines without a list have it always."""
    follows: bool
    """Whether the engine that was asked for can be told the steps, or finds them by itself."""

    @property
    def falls(self) -> bool:
        """Whether more load never wants more drafts, so that an engine can be told."""
        return _falling(self.steps)

    @property
    def most(self) -> int:
        """The largest k of all loads."""
        return max((k for k, _ in self.steps), default=0)

    def at(self, requests: int) -> int:
        """k with so many requests in flight."""
        return next(k for k, last in self.steps if last == 0 or requests <= last)

    def told(self, requests: int) -> int:
        """k of the emitted command with so many requests in flight."""
        return self.at(requests) if self.follows else self.decided

    @property
    def words(self) -> str:
        """The steps as a sentence."""
        parts, first = [], 1
        for k, last in self.steps:
            where = f"{first} and more" if first > 1 else ""
            if last:
                where = f"{first} to {last}" if last > first else f"{first}"
            parts.append(
                (f"k = {k}" if k else "off") + (f" at {where}" if where else " throughout")
            )
            first = last + 1
        return ", ".join(parts)


def chosen_k(setup: Setup, load: LoadPrediction) -> int:
    """k at one load: the best, or the one that was asked for while it gains anything."""
    if setup.method == "none":
        return 0
    if setup.settings.num_speculative_tokens:
        return setup.k if load.middle > 1.0 else 0
    return load.best_k


def draft_schedule(setup: Setup, prediction: PlannedSpeed) -> DraftSchedule:
    """What the prediction would choose by load."""
    ks = [(chosen_k(setup, load), load.requests) for load in prediction.loads]
    deciding = prediction.at(setup.deciding)
    steps = _joined(ks)
    return DraftSchedule(
        steps=steps, decided=chosen_k(setup, deciding), follows=_can_follow(setup, steps)
    )


def _can_follow(setup: Setup, steps: tuple[tuple[int, int], ...]) -> bool:
    engine, drafting = setup.settings.engine, setup.drafting
    if len(steps) == 1 or drafting is None or engine == "foretoken":
        return True
    # A length of its own, such as a depth of suffixes, has no list.
    return engine == "vllm" and _falling(steps) and drafting.default_drafts_key is None


def _falling(steps: tuple[tuple[int, int], ...]) -> bool:
    ks = [k for k, _ in steps]
    return ks == sorted(ks, reverse=True)


def _joined(ks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    steps: list[tuple[int, int]] = []
    for k, requests in ks:
        if steps and steps[-1][0] == k:
            steps[-1] = (k, requests)
        else:
            steps.append((k, requests))
    steps[-1] = (steps[-1][0], 0)
    return tuple(steps)
