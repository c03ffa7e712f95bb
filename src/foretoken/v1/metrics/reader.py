"""What `LLM.get_metrics()` returns, by the names and fields of vLLM's `vllm.v1.metrics.reader`.

A metric has one `value`; a Vector has `values`, one for each draft position. Knows no engine.
"""

from dataclasses import dataclass
from typing import NoReturn


@dataclass(frozen=True, slots=True)
class Metric:
    """A named value; `labels` tell series of one name apart."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Grows only."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """The value now."""

    value: float


@dataclass(frozen=True, slots=True)
class Vector(Metric):
    """Counters by index, such as draft positions."""

    values: list[int]

    @property
    def value(self) -> NoReturn:
        """Nothing: scripts that print the one value of every metric meet this one too."""
        raise AttributeError(f"{self.name} is a Vector, one number per position: use .values")


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """How many values were at most each upper edge; the last edge is `+Inf`."""

    count: int
    sum: float
    buckets: dict[str, int]
