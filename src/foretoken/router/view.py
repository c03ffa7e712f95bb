"""What the router knows of a replica at a moment, and which replicas a request can do with.

Knows no request. Invariant: all numbers are finite and not negative.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import final

from foretoken.types.fingerprint import Fingerprint


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as it last reported, and what it was given since."""

    replica_id: str
    """Of one start: a replica that starts again holds nothing of before, and has another id."""
    fingerprint: Fingerprint
    queue_s: float = 0.0
    """Predicted seconds until it would begin with a request that came now."""
    prefill_token_s: float = 0.0
    """Predicted seconds to compute one token of a prompt."""
    draining: bool = False
    """It ends: what it has may finish, nothing new may come."""

    def __post_init__(self) -> None:
        """Check the numbers: one that is not finite would make every comparison false."""
        seconds = (self.queue_s, self.prefill_token_s)
        assert all(math.isfinite(one) and one >= 0.0 for one in seconds), seconds

    def wait_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt of which it holds nothing: its load."""
        return self.queue_s + prompt_tokens * self.prefill_token_s

    def given(self, missing_tokens: int) -> "ReplicaView":
        """The same replica with one more request, of which it has to compute so many tokens.

        Stands in until the replica reports, so that requests that come at once do not all go to
        the one that was idle last.
        """
        queue_s = self.queue_s + missing_tokens * self.prefill_token_s
        return replace(self, queue_s=queue_s)


class Refusal(StrEnum):
    """Why a replica may not serve a request: the first reason that holds."""

    DRAINING = "draining"
    FAILED = "failed this request before"
    DIFFERENT = "of another arithmetic"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RouteNeeds:
    """Which replicas may serve a request."""

    fingerprint: Fingerprint | None = None
    """Only this one: the tokens to come have to be those that would have come."""
    precision: str | None = None
    """Only this one: the tokens to come have to be of the same distribution."""
    without: frozenset[str] = frozenset()
    """Replicas that failed it."""

    def refusal(self, view: ReplicaView) -> Refusal | None:
        """Why this replica may not serve it; None: it may."""
        if view.draining:
            return Refusal.DRAINING
        if view.replica_id in self.without:
            return Refusal.FAILED
        other = self.fingerprint not in (None, view.fingerprint)
        if other or self.precision not in (None, view.fingerprint.precision):
            return Refusal.DIFFERENT
        return None

    def allows(self, view: ReplicaView) -> bool:
        return self.refusal(view) is None
