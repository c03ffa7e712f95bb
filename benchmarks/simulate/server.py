"""What a server adds around the steps of its engine, and how that is told from what it served.

Knows neither what steps take nor who decides. Invariant: no part of the cost is negative.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCost:
    """Time outside of steps, of which the engine is told nothing."""

    step_s: float = 0.0
    """Between two steps."""
    token_s: float = 0.0
    """Between two steps, for each token that the first one gave."""
    request_s: float = 0.0
    """From when a client asks until its request waits for a step."""


class WatchedRound(NamedTuple):
    """What a server did while clients asked one request after the other."""

    seconds: float
    """From the first request to the last token."""
    steps_s: float
    """Of that, the time of steps."""
    steps: float
    tokens: float
    """Of all answers."""
    requests_alone: float
    """Requests that found nobody else there: the engine waited for them."""


def measured_server_cost(rounds: Sequence[WatchedRound]) -> ServerCost:
    """The cost that explains what was not spent in steps, by least squares.

    The parts can be told apart if some rounds had one client and some many.
    """
    outside_N = np.array([one.seconds - one.steps_s for one in rounds])
    counts_NP = np.array([(one.steps, one.tokens, one.requests_alone) for one in rounds], float)
    # Long rounds are no better known than short ones, as a share.
    weights_N = 1.0 / np.array([one.seconds for one in rounds])
    found_P, left = np.zeros(3), [0, 1, 2]
    while left:
        some_NP = counts_NP[:, left] * weights_N[:, None]
        values = np.linalg.lstsq(some_NP, outside_N * weights_N, rcond=None)[0]
        if values.min() >= 0.0:
            found_P[left] = values
            break
        # A part that comes out negative is too small to be seen.
        del left[int(values.argmin())]
    step_s, token_s, request_s = found_P.tolist()
    return ServerCost(step_s=step_s, token_s=token_s, request_s=request_s)
