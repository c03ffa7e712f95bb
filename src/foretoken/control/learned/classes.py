"""What the requests of a class showed together, and one request alone, of one drafter.

Values, which `acceptance.py` reads and changes.
"""

from math import inf
from typing import final

from foretoken.control.learned.spread import Spread
from foretoken.control.learned.trials import BUCKETS, BucketTrials, chances_by_bucket

CLASS_WEIGHT = 10.0
"""Trials that the usual chance of a drafter counts for beside those of a class."""
LEAST = 0.002
"""A class's chances are no closer to 0 or 1, so that their odds are finite."""
_POOLED_WEIGHT = 30.0
"""Trials that all other classes count for when a class is new."""


@final
class AcceptanceClass:
    """What the requests of a class showed together."""

    __slots__ = (
        "accepted", "members", "new", "num_seen", "prior", "rise", "rise_trials", "row",
        "spread", "trials",
    )  # fmt: skip

    def __init__(self, row: int, prior: list[float]) -> None:
        self.row = row
        self.prior = prior
        self.accepted = [0.0] * BUCKETS
        self.trials = [0.0] * BUCKETS
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
class RequestTrack:
    """What one request showed of one drafter, beside its row of numbers."""

    __slots__ = ("own_class", "row")

    def __init__(self, row: int, own_class: AcceptanceClass) -> None:
        self.row = row
        self.own_class = own_class


@final
class DrafterAcceptance:
    """One drafter's classes and requests."""

    __slots__ = ("classes", "tracks", "usual")

    def __init__(self, usual: float) -> None:
        self.usual = usual
        self.classes: dict[str, AcceptanceClass] = {}
        self.tracks: dict[str, RequestTrack] = {}

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
