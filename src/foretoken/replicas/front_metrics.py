"""Metrics of the front: its own, and those of every replica with a label that names it.

Knows the text that Prometheus scrapes, not what is in it.
"""

from collections.abc import Iterable, Mapping
from typing import final

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from foretoken.router.choosing import Route
from foretoken.router.relay_messages import Restart


@final
class FrontMetrics:
    """What the front counts."""

    def __init__(self, prefix: str) -> None:
        """Names start with `prefix`."""
        self._registry = CollectorRegistry()
        self.http = Counter(
            f"{prefix}:front_http_responses",
            "Answers of the front by path and status.",
            ("path", "status"),
            registry=self._registry,
        )
        self._routes = Counter(
            f"{prefix}:routed_requests",
            "Requests that were sent to a replica, by what decided.",
            ("replica", "reason"),
            registry=self._registry,
        )
        self._hits = Counter(
            f"{prefix}:routed_known_tokens",
            "Prompt tokens that the chosen replicas were known to hold, estimated from text.",
            registry=self._registry,
        )
        self._restarts = Counter(
            f"{prefix}:request_restarts",
            "Requests that were begun again at another replica, by how.",
            ("how",),
            registry=self._registry,
        )
        self._replicas = Gauge(
            f"{prefix}:replicas", "Replicas that can be asked.", registry=self._registry
        )

    def count_route(self, route: Route) -> None:
        """A request goes to a replica."""
        assert route.replica is not None, route
        self._routes.labels(route.replica.replica_id, str(route.reason)).inc()
        self._hits.inc(route.hit_tokens)

    def count_restart(self, how: Restart) -> None:
        """A request goes elsewhere."""
        self._restarts.labels(str(how)).inc()

    def render(self, pages: Mapping[str, str]) -> bytes:
        """What Prometheus scrapes: with the replicas' own pages, by their ids."""
        self._replicas.set(len(pages))
        merged = CollectorRegistry()
        merged.register(_Labelled(pages))
        return generate_latest(self._registry) + generate_latest(merged)


@final
class _Labelled(Collector):
    """The families of several pages, each once, with the label `replica`."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for replica_id, page in sorted(self._pages.items()):
            for family in text_string_to_metric_families(page):
                kept = found.get(family.name)
                if kept is None:
                    kept = Metric(family.name, family.documentation, family.type)
                    found[family.name] = kept
                for sample in family.samples:
                    labels = {"replica": replica_id, **sample.labels}
                    kept.add_sample(sample.name, labels, sample.value)
        return found.values()
