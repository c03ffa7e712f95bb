"""What audits found, for Prometheus: `foretoken:audit_...`, read when it is scraped.

Knows the names and texts; the numbers are the auditor's.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.server.auditing.auditor import Auditor

_LABELS = ("model_name", "engine")


class AuditCollector(Collector):
    """Reads an auditor at each scrape."""

    def __init__(self, auditor: Auditor, model_name: str, prefix: str) -> None:
        """Label everything with `model_name`; names start with `prefix`."""
        self._auditor = auditor
        self._values = (model_name, "0")
        self._start = f"{prefix}:audit_"

    def collect(self) -> Iterable[Metric]:
        """The counts as they stand."""
        found = self._auditor.describe()
        text = "Finished requests decoded again without speculation, by what came of it."
        compared = CounterMetricFamily(f"{self._start}requests", text, labels=(*_LABELS, "outcome"))
        for outcome, count in found["compared"].items():
            compared.add_metric((*self._values, outcome), count)
        compared.add_metric((*self._values, "not_compared"), found["left_out"])
        yield compared
        alarms = CounterMetricFamily(
            f"{self._start}alarms", "Times that speculation was turned off.", labels=_LABELS
        )
        alarms.add_metric(self._values, found["alarms"])
        yield alarms
        for name, text in (
            ("waiting", "Finished requests that wait to be decoded again."),
            ("evidence", "Odds against drawn tokens being plain decoding's; 10,000 is an alarm."),
        ):
            gauge = GaugeMetricFamily(self._start + name, text, labels=_LABELS)
            gauge.add_metric(self._values, found[name])
            yield gauge
