"""Drafts per verification by load: what the prediction would choose, what an engine can be told.

Engines take a list that may only fall as the load rises. A mixture of experts can want the
opposite: few rows touch many experts anew, many rows share them. So can a small target whose
drafter is bound by launches. Such a list is said as advice, and the number of the usual load is
used throughout.
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
    usual_k: int
    """At the usual load; 0: off there."""

    @property
    def falls(self) -> bool:
        """Whether more load never wants more drafts, so that an engine can be told."""
        ks = [k for k, _ in self.steps]
        return ks == sorted(ks, reverse=True)

    @property
    def most(self) -> int:
        """The largest k of all loads."""
        return max((k for k, _ in self.steps), default=0)

    def at(self, requests: int) -> int:
        """k with so many requests in flight."""
        return next(k for k, last in self.steps if last == 0 or requests <= last)

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
    usual = prediction.at(setup.settings.concurrency)
    return DraftSchedule(steps=_joined(ks), usual_k=chosen_k(setup, usual))


def _joined(ks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    steps: list[tuple[int, int]] = []
    for k, requests in ks:
        if steps and steps[-1][0] == k:
            steps[-1] = (k, requests)
        else:
            steps.append((k, requests))
    steps[-1] = (steps[-1][0], 0)
    return tuple(steps)
