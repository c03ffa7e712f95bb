"""What the requests of a class showed together, one request alone, and how much requests differ.

Values of one drafter, which `acceptance.py` reads and changes.
"""

from dataclasses import dataclass, field
from math import inf
from typing import final

from foretoken.control.learned.trials import BUCKETS, FADE, BucketTrials, chances_by_bucket

CLASS_WEIGHT = 10.0
"""Trials that the usual chance of a drafter counts for beside those of a class."""
LEAST = 0.002
"""A class's chances are no closer to 0 or 1, so that their odds are finite."""
_POOLED_WEIGHT = 30.0
"""Trials that all other classes count for when a class is new."""
_WEIGHT = 6.0
"""Trials that a class counts for beside a request's own before its requests showed how they
differ."""
_LEAST_WEIGHT, _MOST_WEIGHT = 3.0, 48.0
_PRIOR_REQUESTS = 6.0
"""Requests that this counts for."""
_KEEPS = 0.99
"""What requests are multiplied by at each later one."""


@final
class Spread:
    """The variance of chances between requests, by moments: what their shares of accepted first
    drafts vary more than trials of one chance would (the empirical Bayes estimate of a beta prior,
    Kleinman 1973). Where requests are alike, what one shows in its first trials is luck, and its
    class says more; where they differ, its own trials do."""

    __slots__ = ("_beyond", "_requests", "_single")

    def __init__(self) -> None:
        self._requests = self._single = self._beyond = 0.0

    @property
    def weight(self) -> float:
        """Trials that the class counts for beside a request's own."""
        if not self._requests:
            return _WEIGHT
        usual = self._single / self._requests
        beyond = self._beyond + _PRIOR_REQUESTS * usual / (_WEIGHT + 1.0)
        single = self._single + _PRIOR_REQUESTS * usual
        if beyond * (_MOST_WEIGHT + 1.0) <= single:
            return _MOST_WEIGHT
        return max(single / beyond - 1.0, _LEAST_WEIGHT)

    def add(self, accepted: float, trials: float, chance: float) -> None:
        """A request ended.

        Args:
            accepted: first drafts of it that were accepted, faded as its trials are.
            trials: of first drafts.
            chance: of a first draft in its class.
        """
        # Faded trials vary as so many unfaded ones do.
        count = trials * (1.0 + FADE) / (2.0 - trials * (1.0 - FADE))
        # One of fewer trials than its class counts for tells nothing.
        if count < _WEIGHT:
            return
        single = chance * (1.0 - chance)
        off = accepted / trials - chance
        # Between requests the variance is v; seen is v + (single - v) / count.
        seen = (off * off - single / count) * count / (count - 1.0)
        self._requests = _KEEPS * self._requests + 1.0
        self._single = _KEEPS * self._single + single
        self._beyond = _KEEPS * self._beyond + seen


@final
class AcceptanceClass:
    """What the requests of a class showed together."""

    __slots__ = (
        "accepted", "members", "new", "num_seen", "prior", "rise", "rise_trials", "row",
        "spread", "trials",
    )  # fmt: skip

    def __init__(self, row: int, prior: list[float]) -> None:
        self.row, self.prior = row, prior
        self.accepted, self.trials = [0.0] * BUCKETS, [0.0] * BUCKETS
        self.new = inf
        """Trials since the chances in its row were worked out."""
        self.spread = Spread()
        self.members = 0
        """Running requests."""
        self.num_seen = 0
        """Drafts since the class was new or changed."""
        self.rise = 0.0
        """How much better trials are explained by chances that rose, in nats."""
        self.rise_trials: list[tuple[BucketTrials, ...]] = []
        """The trials since that was 0."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class RequestTrack:
    """What one request showed of one drafter, beside its row of numbers."""

    row: int
    own_class: AcceptanceClass


@final
@dataclass(frozen=True, slots=True, eq=False)
class DrafterAcceptance:
    """One drafter's classes and requests."""

    usual: float
    classes: dict[str, AcceptanceClass] = field(default_factory=dict)
    tracks: dict[str, RequestTrack] = field(default_factory=dict)

    def prior(self) -> list[float]:
        """What a new class is taken for: the usual chance, and what other classes showed."""
        prior = [self.usual] * BUCKETS
        known = list(self.classes.values())
        accepted = [sum(one.accepted[b] for one in known) for b in range(BUCKETS)]
        trials = [sum(one.trials[b] for one in known) for b in range(BUCKETS)]
        share = _POOLED_WEIGHT / max(_POOLED_WEIGHT, *trials)
        chances = chances_by_bucket(
            [share * one for one in accepted], [share * one for one in trials], prior, CLASS_WEIGHT
        )
        return [min(max(chance, LEAST), 1.0 - LEAST) for chance in chances]
