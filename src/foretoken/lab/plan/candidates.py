"""What is worth trying on a setup, best first: each way of drafting with its k by load.

The search for the best setting of a real server begins here. Owns no formula: predictions come from
`foretoken.lab.plan.predict`.
"""

from dataclasses import dataclass, replace

from foretoken.lab.plan.predict import PlannedSpeed
from foretoken.lab.plan.ranking import method_outlooks
from foretoken.lab.plan.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadChoice:
    """The best draft length of a candidate at one number of requests in flight."""

    requests: int
    k: int
    """0: it does not pay there."""
    low: float
    speed_up: float
    high: float
    """Predicted with this k, at the ends and the middle of what is assumed of the acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way of drafting."""

    method: str
    draft: str | None
    """Name of the draft model; None for methods without one."""
    available: bool
    """Whether it can be tried without a head that would have to be found or trained."""
    loads: tuple[LoadChoice, ...]
    """By rising load."""
    prediction: PlannedSpeed

    def at(self, requests: int) -> LoadChoice:
        """The choice at the load nearest to `requests`."""
        nearest = self.prediction.at(requests).requests
        return next(choice for choice in self.loads if choice.requests == nearest)


def candidates(setup: Setup) -> tuple[Candidate, ...]:
    """Every way of drafting that makes sense on `setup`, the best at its usual load first."""
    found = [
        _candidate(replace(setup, method=outlook.method), outlook.prediction, outlook.available)
        for outlook in method_outlooks(setup)
    ]
    usual = setup.settings.concurrency
    return tuple(sorted(found, key=lambda one: -one.at(usual).speed_up))


def _candidate(setup: Setup, prediction: PlannedSpeed, available: bool) -> Candidate:
    draft = setup.draft.name if setup.draft and setup.drafts_with == "model" else None
    return Candidate(
        method=setup.method,
        draft=draft,
        available=available,
        loads=tuple(
            LoadChoice(
                requests=load.requests,
                k=load.best_k,
                low=load.best_low,
                speed_up=load.best,
                high=load.best_high,
            )
            for load in prediction.loads
        ),
        prediction=prediction,
    )
