"""What control has learnt, for Prometheus: costs, acceptance and the ledger, read when scraped.

Knows the names and texts; the numbers are those of `foretoken.control.report.known`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foretoken.control.learned.trials import LAST_DEPTHS

_TEXTS = {
    "cost_seconds": "What a part of a step or of drafting takes at the usual speed.",
    "cost_level": "How many times as long as usual everything takes now.",
    "cost_error": "How far what was measured is from what is known, as |log(measured / known)|.",
    "acceptance": "Chance of a draft at this depth, if all before it are accepted.",
    "ledger_seconds": "What running requests gained and lost against plain steps.",
}
_LABELS = {
    "cost_seconds": ("of", "part"),
    "cost_level": ("of",),
    "cost_error": ("of", "quantile"),
    "acceptance": ("drafter", "depth"),
    "ledger_seconds": ("side",),
}
_DEPTHS = ("1", *(str(last + 1) for last in LAST_DEPTHS[:-1]))
"""Where the depths begin that are learnt together."""


class LearntCollector(Collector):
    """Reads the models at each scrape."""

    def __init__(
        self, models: Callable[[], Mapping[str, Any] | None], model_name: str, prefix: str
    ) -> None:
        """`models` gives what is known, from any thread; None: nothing is learnt here."""
        self._models = models
        self._values = (model_name, "0")
        self._start = f"{prefix}:control_"

    def collect(self) -> Iterable[Metric]:
        """What is known by now."""
        found = self._models()
        if found is None:
            return
        families = {
            name: GaugeMetricFamily(
                self._start + name, text, labels=("model_name", "engine", *_LABELS[name])
            )
            for name, text in _TEXTS.items()
        }
        for of, cost in (("target", found["target"]), *found["drafters"].items()):
            for name, labels, value in _cost_rows(of, cost):
                families[name].add_metric((*self._values, *labels), value)
        for drafter, classes in found["acceptance"].items():
            for depth, chance in _pooled(classes.values()):
                families["acceptance"].add_metric((*self._values, drafter, depth), chance)
        for side in ("gained", "lost", "worst"):
            families["ledger_seconds"].add_metric(
                (*self._values, side), found["ledger"][f"{side}_s"]
            )
        yield from families.values()


def _cost_rows(of: str, cost: Mapping[str, Any]) -> Iterable[tuple[str, tuple[str, ...], float]]:
    """Family, labels and value of everything that a cost says."""
    yield "cost_level", (of,), cost["level"]
    for quantile, key in (("0.5", "error_p50"), ("0.9", "error_p90")):
        if cost[key] is not None:
            yield "cost_error", (of, quantile), cost[key]
    for key, value in cost.items():
        if not key.endswith("_s"):
            continue
        part = key.removesuffix("_s")
        if isinstance(value, Mapping):
            for first, slope in value.items():
                yield "cost_seconds", (of, f"{part}_from_{first}"), slope
        else:
            yield "cost_seconds", (of, part), value


def _pooled(classes: Iterable[Mapping[str, Any]]) -> Iterable[tuple[str, float]]:
    """Chances over all classes, each by its trials; depths that nobody tried are left out."""
    known = list(classes)
    for bucket, depth in enumerate(_DEPTHS):
        trials = sum(one["trials"][bucket] for one in known)
        if trials:
            kept = sum(one["trials"][bucket] * one["chances"][bucket] for one in known)
            yield depth, kept / trials
