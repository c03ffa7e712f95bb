"""Prometheus metrics of a server: vLLM's names where vLLM has them, ours with a prefix.

Counters and gauges are read from the engine when they are scraped, never kept twice; what only
the loop sees (latencies, ends, what was asked for) is observed here. Knows no endpoint.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import foretoken
from foretoken.control.acceptance import TEMPERATURE_EDGES, temperature_bucket
from foretoken.control.learned.trials import LAST_DEPTHS
from foretoken.control.report.journal import ControlJournal
from foretoken.engine.engine import Engine
from foretoken.server.auditor import Auditor
from foretoken.server.observing.log_lines import milliseconds
from foretoken.server.observing.process_memory import device_bytes
from foretoken.types import FinishReason, Output, Request, RequestMetrics
from foretoken.types.accepted import acceptance_length
from foretoken.v1.metrics import reader as engine_metrics

logger = logging.getLogger("foretoken")

_LABELS = ("model_name", "engine")
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)  # fmt: skip
_PER_TOKEN_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 10.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0,
    480.0, 960.0,
)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTED_HERE = {
    "vllm:request_success",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
}
"""Metrics of the engine that are more exact, or have more labels, here."""
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
_TEXTS = {
    "cost_seconds": "What a part of a step or of drafting takes at the usual speed.",
    "cost_level": "How many times as long as usual everything takes now.",
    "cost_error": "How far what was measured is from what is known, as |log(measured / known)|.",
    "acceptance": "Chance of a draft at this depth, if all before it are accepted.",
    "ledger_seconds": "What running requests gained and lost against plain steps.",
}
_OWN_LABELS = {
    "cost_seconds": ("of", "part"),
    "cost_level": ("of",),
    "cost_error": ("of", "quantile"),
    "acceptance": ("drafter", "depth"),
    "ledger_seconds": ("side",),
}
_DEPTHS = ("1", *(str(last + 1) for last in LAST_DEPTHS[:-1]))
"""Where the depths begin that are learnt together."""
QUANTILES = (0.1, 0.5, 0.9)
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0)
_KEPT = 1000


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


class AcceptanceMetrics(Collector):
    """Histograms by drafter and temperature, and quantiles of the last requests of each bucket."""

    def __init__(
        self, registry: CollectorRegistry, values: tuple[str, str], prefix: str = "foretoken"
    ) -> None:
        """Register in `registry`; `values` are the labels model_name and engine."""
        self._values = values
        self._prefix = prefix
        labels = (*_LABELS, "drafter", "temperature")
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
            self._lengths.labels(*labels).observe(acceptance_length(accepted, len(drafted)))
            self._drafted.labels(*labels).inc(sum(drafted))
            self._accepted.labels(*labels).inc(accepted)

    def collect(self) -> Iterable[Metric]:
        """P10, P50 and P90 per bucket, and from how many requests."""
        labels = (*_LABELS, "temperature")
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
            name: GaugeMetricFamily(self._start + name, text, labels=(*_LABELS, *_OWN_LABELS[name]))
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


class EngineCollector(Collector):
    """Reads the engine at each scrape."""

    def __init__(self, engine: Engine, model_name: str, prefix: str) -> None:
        """Label everything with `model_name`; our own metrics start with `prefix`."""
        self._engine = engine
        self._values = (model_name, "0")
        self._prefix = prefix

    def collect(self) -> Iterable[Metric]:
        """Every metric of the engine as it stands."""
        for metric in self._engine.metrics.read():
            if metric.name not in _COUNTED_HERE:
                yield self._convert(metric)
        scheduler = self._engine.parts.scheduler
        config = self._engine.parts.config
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV pages in use.", scheduler.kv_usage
        )
        running, waiting = scheduler.num_running, scheduler.num_waiting
        yield self._gauge("vllm:num_requests_running", "Requests that hold pages.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", waiting)
        preemptions = scheduler.num_preemptions
        yield self._counter("vllm:num_preemptions", "Requests preempted.", preemptions)
        prefix = scheduler.prefix
        queried, hit = (prefix.num_queried_tokens, prefix.num_hit_tokens) if prefix else (0, 0)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", queried)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found cached.", hit)
        yield from self._drafters_memory()
        held = device_bytes(config.device)
        text = "Memory held on the device; on a CPU, the process's own."
        yield self._gauge(f"{self._prefix}:device_memory_bytes", text, held)
        spec = config.user.speculative_config
        most = spec.num_speculative_tokens if spec is not None else 0
        text = "Most draft tokens per verification, as configured."
        yield self._gauge(f"{self._prefix}:num_speculative_tokens", text, most)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV cache.", labels=("block_size", "num_gpu_blocks")
        )
        info.add_metric((str(config.page_size), str(config.num_pages)), 1)
        yield info
        version = GaugeMetricFamily(f"{self._prefix}:info", "The version.", labels=("version",))
        version.add_metric((foretoken.__version__,), 1)
        yield version

    def _drafters_memory(self) -> Iterable[Metric]:
        """What drafters keep under the target's pages, and find there."""
        parts, own = self._engine.parts, self._prefix
        queried, hit = parts.proposer.prefix_tokens
        text = "Tokens of sequences that drafters were first fed of."
        yield self._counter(f"{own}:drafter_prefix_cache_queries", text, queried)
        text = "Those of them that had been fed for others."
        yield self._counter(f"{own}:drafter_prefix_cache_hits", text, hit)
        if parts.shared is not None:
            held, reclaimed = parts.shared.draft_bytes, parts.shared.num_reclaimed
            yield self._gauge(f"{own}:draft_kv_bytes", "Written by drafters.", held)
            text = "Pages that drafters gave back."
            yield self._counter(f"{own}:draft_pages_reclaimed", text, reclaimed)

    def _convert(self, metric: engine_metrics.Metric) -> Metric:
        name = metric.name.replace("foretoken:", f"{self._prefix}:", 1)
        if isinstance(metric, engine_metrics.Gauge):
            return self._gauge(name, name, metric.value)
        if isinstance(metric, engine_metrics.Counter):
            return self._counter(name, name, metric.value)
        if isinstance(metric, engine_metrics.Histogram):
            steps = HistogramMetricFamily(name, "Tokens of a step.", labels=_LABELS)
            steps.add_metric(self._values, list(metric.buckets.items()), metric.sum)
            return steps
        assert isinstance(metric, engine_metrics.Vector), type(metric)
        family = CounterMetricFamily(name, name, labels=(*_LABELS, "position"))
        for position, value in enumerate(metric.values):
            family.add_metric((*self._values, str(position)), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family


@dataclass(slots=True)
class _Siblings:
    """The outputs of one prompt that have not ended, and the longest of those that have."""

    live: int
    most: int = 0


class ServerMetrics:
    """Histograms and counts of requests."""

    def __init__(self, engine: Engine, model_name: str, prefix: str = "foretoken") -> None:
        """Register everything in a registry of its own."""
        self.registry = CollectorRegistry()
        self.registry.register(EngineCollector(engine, model_name, prefix))
        deciding = engine.parts.controller
        if deciding.journal is not None:
            self.registry.register(ControlCollector(deciding.journal, model_name, prefix))
        if deciding.control is not None:
            self.registry.register(LearntCollector(deciding.models, model_name, prefix))
        self._values = (model_name, "0")
        self._started: dict[str, Request] = {}
        self._last_at: dict[str, float] = {}
        self._num_tokens: dict[str, int] = {}
        self._siblings: dict[str, _Siblings] = {}
        self._first_token = self._histogram("time_to_first_token_seconds", _FIRST_TOKEN_S)
        self._between = self._histogram("inter_token_latency_seconds", _PER_TOKEN_S)
        self._between_formerly = self._histogram("time_per_output_token_seconds", _PER_TOKEN_S)
        self._per_token = self._histogram("request_time_per_output_token_seconds", _PER_TOKEN_S)
        self._whole = self._histogram("e2e_request_latency_seconds", _REQUEST_S)
        self._queued = self._histogram("request_queue_time_seconds", _REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", _REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", _REQUEST_S)
        self._inference = self._histogram("request_inference_time_seconds", _REQUEST_S)
        self._prompt = self._histogram("request_prompt_tokens", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", _TOKENS)
        self._longest = self._histogram("request_max_num_generation_tokens", _TOKENS)
        self._asked = self._histogram("request_params_max_tokens", _TOKENS)
        self._n = self._histogram("request_params_n", (1, 2, 5, 10, 20))
        self._ends = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self.registry,
        )
        self._acceptance = AcceptanceMetrics(self.registry, self._values, prefix)
        ProcessCollector(registry=self.registry)
        self.http = Counter(
            f"{prefix}:http_responses",
            "Answers by path and status.",
            ("path", "status"),
            registry=self.registry,
        )

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    def opened(self, requests: Sequence[Request]) -> None:
        """Requests that were accepted."""
        by_prompt: dict[str, _Siblings] = {}
        for request in requests:
            name, n = request.request_id, request.params.n
            prompt = name if n == 1 else name.removesuffix(f"-{request.sample_index}")
            siblings = by_prompt.setdefault(prompt, _Siblings(0))
            siblings.live += 1
            self._siblings[name] = siblings
            self._started[request.request_id] = request
            self._prompt.observe(len(request.prompt_token_ids))
            self._asked.observe(request.max_tokens)
            self._n.observe(request.params.n)

    def observe(self, outputs: Sequence[Output]) -> None:
        """Outputs of a step, as `AsyncEngine` gives them to observers."""
        for output in outputs:
            request = self._started.get(output.request_id)
            if request is not None:
                self._observe(output, request)

    def _observe(self, output: Output, request: Request) -> None:
        request_id, count = output.request_id, len(output.new_token_ids)
        self._num_tokens[request_id] = self._num_tokens.get(request_id, 0) + count
        if count:
            now = time.monotonic()
            if request_id in self._last_at:
                self._between.observe(now - self._last_at[request_id])
                self._between_formerly.observe(now - self._last_at[request_id])
            else:
                self._first_token.observe(now - request.arrival)
            self._last_at[request_id] = now
        if output.finish_reason is not None:
            self._end(output)

    def _end(self, output: Output) -> None:
        request_id, reason = output.request_id, output.finish_reason
        assert reason is not None, "called at the end"
        request = self._started.pop(request_id)
        count = self._num_tokens.pop(request_id)
        self._last_at.pop(request_id, None)
        siblings = self._siblings.pop(request_id)
        siblings.live, siblings.most = siblings.live - 1, max(siblings.most, count)
        if siblings.live == 0:
            self._longest.observe(siblings.most)
        self._ends.labels(*self._values, str(reason)).inc()
        times = output.metrics
        facts = {"id": request_id, "finish_reason": str(reason), "completion_tokens": count}
        if times is not None:
            facts |= {"queued_ms": milliseconds(times.queued_s)}
            facts |= {"ttft_ms": milliseconds(times.first_token_s)}
            facts |= {"e2e_ms": milliseconds(times.finished_s)}
            facts |= {"acceptance_length": round(times.acceptance_length, 3)}
        logger.info("ended", extra={"facts": facts})
        if times is not None:
            self._acceptance.observe(request.params.temperature, times)
        if times is None or reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        decoding = times.finished_s - times.first_token_s
        self._generated.observe(count)
        self._whole.observe(times.finished_s)
        self._queued.observe(times.queued_s)
        self._prefill.observe(times.first_token_s - times.queued_s)
        self._decode.observe(decoding)
        self._inference.observe(times.finished_s - times.queued_s)
        if count > 1:
            self._per_token.observe(decoding / (count - 1))

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(
            f"vllm:{name}", name.replace("_", " "), _LABELS, buckets=buckets, registry=self.registry
        )
        return family.labels(*self._values)
