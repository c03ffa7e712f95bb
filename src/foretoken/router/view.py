"""What the router knows of a replica at a moment, and which replicas a request can do with.

Knows no request. Invariant: all numbers are finite and not negative.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, final

from foretoken.types.fingerprint import Fingerprint


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """One replica as it last reported, and what it was given since."""

    replica_id: str
    """Of one start: a replica that starts again holds nothing of before, and has another id."""
    fingerprint: Fingerprint
    queued: int = 0
    """Requests that wait."""
    running: int = 0
    """Requests that are computed."""
    kv_use: float = 0.0
    """Share of the pages that running requests hold, 0 to 1."""
    queue_s: float = 0.0
    """Predicted seconds until it would begin with a request that came now."""
    prefill_token_s: float = 0.0
    """Predicted seconds to compute one token of a prompt."""
    draining: bool = False
    """It ends: what it has may finish, nothing new may come."""

    def __post_init__(self) -> None:
        """Check the numbers: one that is not finite would make every comparison false."""
        counts = (self.queued, self.running)
        assert min(counts) >= 0, counts
        shares = (self.kv_use, self.queue_s, self.prefill_token_s)
        assert all(math.isfinite(one) and one >= 0.0 for one in shares), shares

    def wait_s(self, prompt_tokens: int) -> float:
        """Seconds to the first token of a prompt of which it holds nothing: its load."""
        return self.queue_s + prompt_tokens * self.prefill_token_s

    def given(self, missing_tokens: int) -> "ReplicaView":
        """The same replica with one more request, of which it has to compute so many tokens.

        Stands in until the replica reports, so that requests that come at once do not all go to
        the one that was idle last.
        """
        queue_s = self.queue_s + missing_tokens * self.prefill_token_s
        return replace(self, queued=self.queued + 1, queue_s=queue_s)


class Refusals(NamedTuple):
    """Why replicas may not serve a request: how many for each reason."""

    draining: int = 0
    failed: int = 0
    """They failed this request before."""
    different: int = 0
    """Their arithmetic is another."""

    def __str__(self) -> str:
        """As part of a sentence."""
        parts = (
            (self.draining, "draining"),
            (self.failed, "failed this request before"),
            (self.different, "of another arithmetic"),
        )
        return ", ".join(f"{count} {word}" for count, word in parts if count)


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

    def allows(self, view: ReplicaView) -> bool:
        """Whether this replica may; one that is draining never may."""
        return not view.draining and view.replica_id not in self.without and self._equals(view)

    def refusals(self, views: Iterable[ReplicaView]) -> Refusals:
        """Why others may not; each counts for its first reason."""
        draining = failed = different = 0
        for view in views:
            if view.draining:
                draining += 1
            elif view.replica_id in self.without:
                failed += 1
            elif not self._equals(view):
                different += 1
        return Refusals(draining, failed, different)

    def _equals(self, view: ReplicaView) -> bool:
        if self.fingerprint is not None and view.fingerprint != self.fingerprint:
            return False
        return self.precision is None or view.fingerprint.precision == self.precision
