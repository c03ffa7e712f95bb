"""No request is made slower than without speculation: a book of what each has gained or lost.

A sequence gains when it gets tokens faster than plain steps would have given them, and loses when
it waits for the drafts of others. The loss that a request may have at its end is a share of what
all its tokens take in plain steps; a part of what is left of that may be lost in one step.
Knows seconds and tokens only.
"""

from collections.abc import Mapping
from typing import final

import numpy as np

from foretoken.control.adaptive.exploring import TRIAL_SHARE
from foretoken.control.learned.regression import Floats


@final
class Ledger:
    """What some requests gained, in seconds; less than 0: lost."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def left(self, gained_s: Floats, tokens_N: Floats, plain_s: float, guard_N: Floats) -> Floats:
        """Seconds that each sequence may lose from now on, [N].

        Args:
            gained_s: what each has gained so far.
            tokens_N: tokens of each, those that are still expected included.
            plain_s: of a plain step now.
            guard_N: share of its time without speculation that each may lose.
        """
        # What a request may lose is for trials, which the account pays, and for plans.
        share_N = np.maximum(guard_N - TRIAL_SHARE, 0.5 * guard_N)
        left_N: Floats = np.maximum(gained_s + share_N * plain_s * tokens_N, 0.0)
        return left_N

    def of(self, request_ids: list[str]) -> Floats:
        """What these have gained, [N]."""
        known = self._known
        return np.array([known.get(request_id, 0.0) for request_id in request_ids])

    def gained(self, request_id: str) -> float:
        """What one request has gained."""
        return self._known.get(request_id, 0.0)

    def keep(self, gained_s: Mapping[str, float]) -> None:
        """These have gained so much by now."""
        self._known.update(gained_s)

    def release(self, request_id: str) -> None:
        """Forget a request that ended."""
        self._known.pop(request_id, None)

    def describe(self) -> dict[str, float]:
        """How many requests there are, what those gained together that are ahead of plain steps,
        what those lost that are behind, and the largest loss of one. From any thread."""
        gained = list(self._known.values())
        return {
            "requests": len(gained),
            "gained_s": sum(one for one in gained if one > 0.0),
            "lost_s": -sum(one for one in gained if one < 0.0),
            "worst_s": max([0.0, *(-one for one in gained)]),
        }
