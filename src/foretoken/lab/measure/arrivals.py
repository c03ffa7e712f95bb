"""When requests arrive: seconds from the start of a load, the same for every arm.

Poisson and gamma arrivals are drawn from a seed, so that two arms can be given the same instants.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.stats.intervals import Floats

Kind = Literal["closed", "constant", "poisson", "gamma", "trace"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How hard the server is driven."""

    kind: Kind = "closed"
    """closed: `concurrency` requests in flight; the others are open: arrivals do not wait."""
    concurrency: int = 1
    rate: float | None = None
    """Requests per second of constant, poisson and gamma arrivals."""
    burstiness: float = 1.0
    """Of gamma arrivals, the shape as in vLLM's benchmark: 1 is Poisson, below it bursts more."""
    speed: float = 1.0
    """Of a trace: 2 replays it in half its time."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        if self.kind in ("constant", "poisson", "gamma") and not (self.rate and self.rate > 0):
            raise ConfigError("load.rate", self.rate, f"requests per second > 0 ({self.kind})")
        if self.concurrency < 1:
            raise ConfigError("load.concurrency", self.concurrency, "an integer >= 1")
        if self.burstiness <= 0:
            raise ConfigError("load.burstiness", self.burstiness, "a number > 0")
        if self.speed <= 0:
            raise ConfigError("load.speed", self.speed, "a number > 0")

    def __str__(self) -> str:
        """A few words for tables."""
        if self.kind == "closed":
            return f"{self.concurrency} in flight"
        if self.kind == "trace":
            return f"trace x{self.speed:g}"
        burst = f", burstiness {self.burstiness:g}" if self.kind == "gamma" else ""
        return f"{self.rate:g}/s {self.kind}{burst}"


def draw_arrivals(load: Load, count: int, seed: int) -> Floats:
    """`count` instants of generated arrivals, from 0, in order."""
    assert load.kind in ("constant", "poisson", "gamma") and load.rate, load
    if load.kind == "constant":
        return np.arange(count) / load.rate
    shape = 1.0 if load.kind == "poisson" else load.burstiness
    gaps_N = np.random.default_rng(seed).gamma(shape, 1.0 / (shape * load.rate), count)
    return np.asarray(np.cumsum(gaps_N) - gaps_N[0] if count else gaps_N, np.float64)
