"""Acceptance of finished requests by drafter and by temperature, for Prometheus.

Knows finished requests only; what steps did is counted by the engine. Invariant: a request counts
once in its temperature's bucket, and once for every drafter that drafted for it.
"""

import statistics
from collections import deque
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.control.acceptance import TEMPERATURE_EDGES, temperature_bucket
from foretoken.types import RequestMetrics

QUANTILES = (0.1, 0.5, 0.9)
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0)
_KEPT = 1000


class AcceptanceMetrics(Collector):
    """Histograms by drafter and temperature, and quantiles of the last requests of each bucket."""

    def __init__(
        self, registry: CollectorRegistry, values: tuple[str, str], prefix: str = "foretoken"
    ) -> None:
        """Register in `registry`; `values` are the labels model_name and engine."""
        self._values = values
        self._prefix = prefix
        labels = ("model_name", "engine", "drafter", "temperature")
        self._lengths = Histogram(
            f"{prefix}:request_acceptance_length",
            "Tokens per verification with a draft, per request.",
            labels,
            buckets=_LENGTHS,
            registry=registry,
        )
        self._drafted = Counter(
            f"{prefix}:drafter_draft_tokens", "Draft tokens checked.", labels, registry=registry
        )
        self._accepted = Counter(
            f"{prefix}:drafter_accepted_tokens", "Of those accepted.", labels, registry=registry
        )
        edges = (*TEMPERATURE_EDGES, float("inf"))
        self._recent = {temperature_bucket(edge): deque[float](maxlen=_KEPT) for edge in edges}
        registry.register(self)

    def observe(self, temperature: float, metrics: RequestMetrics) -> None:
        """Add a request that ended."""
        if not metrics.accepted_per_step:
            return
        bucket = temperature_bucket(temperature)
        self._recent[bucket].append(metrics.acceptance_length)
        steps = list(
            zip(
                metrics.drafter_per_step,
                metrics.drafted_per_step,
                metrics.accepted_per_step,
                strict=True,
            )
        )
        for drafter in set(metrics.drafter_per_step):
            drafted = [count for name, count, _ in steps if name == drafter]
            accepted = sum(count for name, _, count in steps if name == drafter)
            labels = (*self._values, drafter, bucket)
            self._lengths.labels(*labels).observe(1 + accepted / len(drafted))
            self._drafted.labels(*labels).inc(sum(drafted))
            self._accepted.labels(*labels).inc(accepted)

    def collect(self) -> Iterable[Metric]:
        """P10, P50 and P90 per bucket, and from how many requests."""
        labels = ("model_name", "engine", "temperature")
        quantiles = GaugeMetricFamily(
            f"{self._prefix}:acceptance_length_quantile",
            f"Of the last {_KEPT} requests in the bucket.",
            labels=(*labels, "quantile"),
        )
        counts = GaugeMetricFamily(
            f"{self._prefix}:acceptance_length_requests",
            "Requests that the quantiles are from.",
            labels=labels,
        )
        for bucket, kept in self._recent.items():
            lengths = sorted(kept)
            counts.add_metric((*self._values, bucket), len(lengths))
            for quantile, value in zip(QUANTILES, _quantiles(lengths), strict=False):
                quantiles.add_metric((*self._values, bucket, f"{quantile:g}"), value)
        return [quantiles, counts]


def _quantiles(ordered: list[float]) -> list[float]:
    """P10, P50 and P90; nothing from nothing."""
    if len(ordered) < 2:
        return ordered * len(QUANTILES)
    tenths = statistics.quantiles(ordered, n=10, method="inclusive")
    return [tenths[0], tenths[4], tenths[8]]
