"""What is asked and when: prompts with their parameters and classes, and their arrivals.

An `Item` is what both arms of a comparison get alike. Poisson and gamma arrivals are drawn from a
seed, so that two arms can be given the same instants. Knows no server and no clock.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.stats.intervals import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One request to make."""

    index: int
    prompt: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    """A conversation; takes the chat endpoint instead of completions."""
    max_tokens: int = 128
    temperature: float | None = None
    """None: what the server does by default."""
    seed: int | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    category: str = ""
    cluster: str = ""
    arrival_s: float | None = None
    """Seconds from the start of the workload; None where arrivals are generated."""

    @property
    def deterministic(self) -> bool:
        """Whether the same server must write the same text again."""
        return self.temperature == 0.0 or self.seed is not None


def with_temperatures(items: Sequence[Item], temperatures: Sequence[float]) -> list[Item]:
    """Temperatures dealt out in turn over items that have none of their own."""
    if not temperatures:
        return list(items)
    return [
        item
        if item.temperature is not None
        else replace(item, temperature=float(temperatures[item.index % len(temperatures)]))
        for item in items
    ]


def with_settings(
    items: Sequence[Item],
    *,
    max_tokens: int | None = None,
    seed: int | None = None,
    parameters: dict[str, Any] | None = None,
) -> list[Item]:
    """Give all items one length, seeds counted up from `seed`, and parameters."""
    changed = []
    for item in items:
        tokens = item.max_tokens if max_tokens is None else max_tokens
        own_seed = item.seed if seed is None else seed + item.index
        merged = {**item.parameters, **(parameters or {})}
        changed.append(replace(item, max_tokens=tokens, seed=own_seed, parameters=merged))
    return changed


def take(items: Sequence[Item], count: int, start: int = 0) -> list[Item]:
    """`count` items from `start`, going round when they run out, indices counted on."""
    if not items:
        raise ConfigError("--workload", "no prompts", "a file with at least one prompt, or demo")
    return [
        replace(items[i % len(items)], index=i, cluster=items[i % len(items)].cluster or str(i))
        for i in range(start, start + count)
    ]


def parameters_seen(items: Sequence[Item]) -> dict[str, int]:
    """How many items set each sampling parameter."""
    seen: Counter[str] = Counter()
    for item in items:
        seen.update(name for name, value in item.parameters.items() if value is not None)
        seen.update(["temperature"] if item.temperature is not None else [])
        seen.update(["seed"] if item.seed is not None else [])
    return dict(sorted(seen.items()))


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
    """Shape of gamma arrivals as in vLLM's benchmark: 1 is Poisson, below it bursts more."""
    speed: float = 1.0
    """Pace of a trace: 2 replays it in half its time."""

    def __post_init__(self) -> None:
        """Raise a ConfigError for what is out of range."""
        if self.kind in ("constant", "poisson", "gamma") and not (self.rate and self.rate > 0):
            allowed = f"requests per second > 0, as in --load {self.kind}:2"
            raise ConfigError("load.rate", self.rate, allowed)
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
