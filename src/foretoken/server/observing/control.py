"""What control does, for Prometheus: `foretoken:control_...`, read when it is scraped.

Knows the names and texts; the numbers are the journal's.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.control.report.journal import ControlJournal

_LABELS = ("model_name", "engine")
_OF_DRAFTERS = {
    "draft_length": (
        GaugeMetricFamily,
        "Usual draft tokens now; 0 while it rests.",
        "draft_length",
    ),
    "pass_seconds": (GaugeMetricFamily, "Time of one pass of the drafter.", "pass_s"),
    "resting_seconds": (CounterMetricFamily, "Time of steps in which it rested.", "resting_s"),
    "share_of_steps": (GaugeMetricFamily, "Steps in which it drafted.", "share_of_steps"),
}
_OF_ALL = {
    "exploring_seconds": (CounterMetricFamily, "What trials cost.", "exploring_s"),
    "account_seconds": (GaugeMetricFamily, "What trials may still cost.", "account_s"),
    "forgone_tokens": (CounterMetricFamily, "Not written so that nobody waits.", "forgone_tokens"),
    "wasted_seconds": (CounterMetricFamily, "Checking drafts that were refused.", "wasted_s"),
    "changes": (CounterMetricFamily, "A drafter rested, returned, or drafts another length.",
                "num_changes"),
}  # fmt: skip
_OF_STEP = {
    "predicted_step_seconds": ("The last step, as predicted.", "predicted_s"),
    "plain_step_seconds": ("The last step without drafts, as predicted.", "plain_s"),
    "step_seconds": ("The last step, as measured.", "measured_s"),
}


class ControlCollector(Collector):
    """Reads the journal at each scrape."""

    def __init__(self, journal: ControlJournal, model_name: str, prefix: str) -> None:
        """Label everything with `model_name`; names start with `prefix`."""
        self._journal = journal
        self._values = (model_name, "0")
        self._start = f"{prefix}:control_"

    def collect(self) -> Iterable[Metric]:
        """What is known; numbers that nobody has are left out."""
        found = self._journal.describe()
        for name, (kind, text, key) in _OF_ALL.items():
            if found[key] is not None:
                yield self._single(kind, name, text, found[key])
        for name, (text, key) in _OF_STEP.items():
            step = found["step"]
            if step is not None and step[key] is not None:
                yield self._single(GaugeMetricFamily, name, text, step[key])
        error = found["prediction_error"]
        if error is not None:
            yield self._error(error)
        for name, (kind, text, key) in _OF_DRAFTERS.items():
            family = kind(self._start + name, text, labels=(*_LABELS, "drafter"))
            for drafter, one in found["drafters"].items():
                if one[key] is not None:
                    family.add_metric((*self._values, drafter), one[key])
            yield family

    def _single(self, kind: Any, name: str, text: str, value: float) -> Metric:
        family: Metric = kind(self._start + name, text, labels=_LABELS)
        family.add_metric(self._values, value)  # type: ignore[attr-defined]
        return family

    def _error(self, error: Mapping[str, float]) -> Metric:
        text = "How far measured steps are from predicted ones, as a share."
        labels = (*_LABELS, "quantile")
        family = GaugeMetricFamily(self._start + "prediction_error", text, labels=labels)
        for quantile, key in (("0.5", "p50"), ("0.9", "p90")):
            family.add_metric((*self._values, quantile), error[key])
        return family
