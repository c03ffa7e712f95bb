"""Prometheus metrics of a server: vLLM's names where vLLM has them, ours with a prefix.

Counters and gauges are read from the engine when they are scraped, never kept twice; what only
the loop sees (latencies, ends, what was asked for) is observed here. Knows no endpoint.
"""

import logging
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

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
from foretoken.engine.engine import Engine
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
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
_COUNTER, _GAUGE = CounterMetricFamily, GaugeMetricFamily
_OF_DRAFTERS: tuple[tuple[Kind, str, str, str], ...] = (
    (_GAUGE, "draft_length", "Usual draft tokens now; 0 while it rests.", "draft_length"),
    (_GAUGE, "pass_seconds", "Time of one pass of the drafter.", "pass_s"),
    (_COUNTER, "resting_seconds", "Time of steps in which it rested.", "resting_s"),
    (_GAUGE, "share_of_steps", "Steps in which it drafted.", "share_of_steps"),
)
_OF_ALL: tuple[tuple[Kind, str, str, str], ...] = (
    (_COUNTER, "exploring_seconds", "What trials cost.", "exploring_s"),
    (_GAUGE, "account_seconds", "What trials may still cost.", "account_s"),
    (_COUNTER, "forgone_tokens", "Not written so that nobody waits.", "forgone_tokens"),
    (_COUNTER, "wasted_seconds", "Checking drafts that were refused.", "wasted_s"),
    (_COUNTER, "changes", "A drafter rested, returned, or drafts another length.", "num_changes"),
)
_OF_STEP = (
    ("predicted_step_seconds", "The last step, as predicted.", "predicted_s"),
    ("plain_step_seconds", "The last step without drafts, as predicted.", "plain_s"),
    ("step_seconds", "The last step, as measured.", "measured_s"),
)
_LEARNT = {
    "cost_seconds": (
        "What a part of a step or of drafting takes at the usual speed.",
        ("of", "part"),
    ),
    "cost_level": ("How many times as long as usual everything takes now.", ("of",)),
    "cost_error": (
        "How far what was measured is from what is known, as |log(measured / known)|.",
        ("of", "quantile"),
    ),
    "acceptance": (
        "Chance of a draft at this depth, if all before it are accepted.",
        ("drafter", "depth"),
    ),
    "ledger_seconds": ("What running requests gained and lost against plain steps.", ("side",)),
}
_DEPTHS = ("1", *(str(last + 1) for last in LAST_DEPTHS[:-1]))
"""Where the depths begin that are learnt together."""
QUANTILES = (0.1, 0.5, 0.9)
_LENGTHS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 11.0, 16.0)
_KEPT = 1000
Row = tuple[tuple[str, ...], float]
"""Values of a family's own labels, and the number."""


@final
class ScrapedFamilies(Collector):
    """What a function reads at each scrape, labelled with the model and the engine."""

    def __init__(
        self,
        model_name: str,
        prefix: str,
        read: "Callable[[ScrapedFamilies], Iterable[Metric]]",
    ) -> None:
        """`read` is given this, to make families; names that begin with `foretoken:` begin with
        `prefix` instead."""
        self.values = (model_name, "0")
        self._prefix, self._read = prefix, read

    def collect(self) -> Iterable[Metric]:
        return self._read(self)

    def one(self, kind: Kind, name: str, text: str, value: float) -> Metric:
        return self.many(kind, name, text, (), [((), value)])

    def many(
        self, kind: Kind, name: str, text: str, labels: tuple[str, ...], rows: Iterable[Row]
    ) -> Metric:
        """A family with labels of its own."""
        family = kind(self.named(name), text, labels=(*_LABELS, *labels))
        for own, value in rows:
            family.add_metric((*self.values, *own), value)
        return family

    def named(self, name: str) -> str:
        """With the prefix that was set."""
        return name.replace("foretoken:", f"{self._prefix}:", 1)


def audit_families(found: Mapping[str, Any], of: ScrapedFamilies) -> Iterator[Metric]:
    """What an auditor has described."""
    rows = [*found["compared"].items(), ("not_compared", found["left_out"])]
    text = "Finished requests decoded again without speculation, by what came of it."
    outcomes = [((outcome,), count) for outcome, count in rows]
    yield of.many(_COUNTER, "foretoken:audit_requests", text, ("outcome",), outcomes)
    text = "Times that speculation was turned off."
    yield of.one(_COUNTER, "foretoken:audit_alarms", text, found["alarms"])
    text = "Finished requests that wait to be decoded again."
    yield of.one(_GAUGE, "foretoken:audit_waiting", text, found["waiting"])
    text = "Odds against drawn tokens being plain decoding's; 10,000 is an alarm."
    yield of.one(_GAUGE, "foretoken:audit_evidence", text, found["evidence"])


class AcceptanceMetrics:
    """Histograms by drafter and temperature, and quantiles of the last requests of each bucket."""

    def __init__(
        self, registry: CollectorRegistry, model_name: str, prefix: str = "foretoken"
    ) -> None:
        self._values = (model_name, "0")
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
        registry.register(ScrapedFamilies(model_name, prefix, self._families))

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

    def _families(self, of: ScrapedFamilies) -> Iterator[Metric]:
        """P10, P50 and P90 per bucket, and from how many requests."""
        rows = [
            ((bucket, f"{quantile:g}"), value)
            for bucket, kept in self._recent.items()
            for quantile, value in zip(QUANTILES, _quantiles(sorted(kept)), strict=False)
        ]
        name, text = "foretoken:acceptance_length_quantile", f"Of the last {_KEPT} requests in the"
        yield of.many(_GAUGE, name, f"{text} bucket.", ("temperature", "quantile"), rows)
        counts = [((bucket,), len(kept)) for bucket, kept in self._recent.items()]
        name, text = "foretoken:acceptance_length_requests", "Requests that the quantiles are from."
        yield of.many(_GAUGE, name, text, ("temperature",), counts)


def _quantiles(ordered: list[float]) -> list[float]:
    """P10, P50 and P90; nothing from nothing."""
    if len(ordered) < 2:
        return ordered * len(QUANTILES)
    tenths = statistics.quantiles(ordered, n=10, method="inclusive")
    return [tenths[0], tenths[4], tenths[8]]


def learnt_families(found: Mapping[str, Any] | None, of: ScrapedFamilies) -> Iterator[Metric]:
    """What the models have learnt by now; None: nothing is learnt here."""
    if found is None:
        return
    rows: dict[str, list[Row]] = {name: [] for name in _LEARNT}
    for what, cost in (("target", found["target"]), *found["drafters"].items()):
        for name, labels, value in _cost_rows(what, cost):
            rows[name].append((labels, value))
    for drafter, classes in found["acceptance"].items():
        rows["acceptance"] += (
            ((drafter, depth), chance) for depth, chance in _pooled(classes.values())
        )
    rows["ledger_seconds"] = [
        ((side,), found["ledger"][f"{side}_s"]) for side in ("gained", "lost", "worst")
    ]
    for name, (text, own) in _LEARNT.items():
        yield of.many(_GAUGE, f"foretoken:control_{name}", text, own, rows[name])


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


def control_families(found: Mapping[str, Any], of: ScrapedFamilies) -> Iterator[Metric]:
    """What control's journal has described; numbers that nobody has are left out."""
    start = "foretoken:control_"
    for kind, name, text, key in _OF_ALL:
        if found[key] is not None:
            yield of.one(kind, start + name, text, found[key])
    for name, text, key in _OF_STEP:
        step = found["step"]
        if step is not None and step[key] is not None:
            yield of.one(_GAUGE, start + name, text, step[key])
    error = found["prediction_error"]
    if error is not None:
        text = "How far measured steps are from predicted ones, as a share."
        quantiles = [(("0.5",), error["p50"]), (("0.9",), error["p90"])]
        yield of.many(_GAUGE, f"{start}prediction_error", text, ("quantile",), quantiles)
    for kind, name, text, key in _OF_DRAFTERS:
        drafters = found["drafters"].items()
        rows = [((drafter,), one[key]) for drafter, one in drafters if one[key] is not None]
        yield of.many(kind, start + name, text, ("drafter",), rows)


def engine_families(engine: Engine, of: ScrapedFamilies) -> Iterator[Metric]:
    """Every metric of the engine."""
    for metric in engine.metrics.read():
        if metric.name not in _COUNTED_HERE:
            yield _converted(metric, of)
    parts, scheduler = engine.parts, engine.parts.scheduler
    prefix, shared = scheduler.prefix, parts.shared
    spec = parts.config.user.speculative_config
    queried, hit = (prefix.num_queried_tokens, prefix.num_hit_tokens) if prefix else (0, 0)
    fed, fed_before = parts.proposer.prefix_tokens
    found: list[tuple[Kind, str, str, float]] = [
        (_GAUGE, "vllm:kv_cache_usage_perc", "Share of KV pages in use.", scheduler.kv_usage),
        (_GAUGE, "vllm:num_requests_running", "Requests that hold pages.", scheduler.num_running),
        (_GAUGE, "vllm:num_requests_waiting", "Requests that wait.", scheduler.num_waiting),
        (_COUNTER, "vllm:num_preemptions", "Requests preempted.", scheduler.num_preemptions),
        (_COUNTER, "vllm:prefix_cache_queries", "Prompt tokens looked up.", queried),
        (_COUNTER, "vllm:prefix_cache_hits", "Prompt tokens found cached.", hit),
        (_COUNTER, "foretoken:drafter_prefix_cache_queries",
         "Tokens of sequences that drafters were first fed of.", fed),
        (_COUNTER, "foretoken:drafter_prefix_cache_hits",
         "Those of them that had been fed for others.", fed_before),
        (_GAUGE, "foretoken:device_memory_bytes",
         "Memory held on the device; on a CPU, the process's own.",
         device_bytes(parts.config.device)),
        (_GAUGE, "foretoken:num_speculative_tokens",
         "Most draft tokens per verification, as configured.",
         spec.num_speculative_tokens if spec is not None else 0),
    ]  # fmt: skip
    if shared is not None:
        text = "Pages that drafters gave back."
        found += [
            (_GAUGE, "foretoken:draft_kv_bytes", "Written by drafters.", shared.draft_bytes),
            (_COUNTER, "foretoken:draft_pages_reclaimed", text, shared.num_reclaimed),
        ]
    for kind, name, text, value in found:
        yield of.one(kind, name, text, value)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "The KV cache.", labels=("block_size", "num_gpu_blocks")
    )
    info.add_metric((str(parts.config.page_size), str(parts.config.num_pages)), 1)
    yield info
    version = GaugeMetricFamily(of.named("foretoken:info"), "The version.", labels=("version",))
    version.add_metric((foretoken.__version__,), 1)
    yield version


def _converted(metric: engine_metrics.Metric, of: ScrapedFamilies) -> Metric:
    name = of.named(metric.name)
    if isinstance(metric, engine_metrics.Gauge):
        return of.one(_GAUGE, name, name, metric.value)
    if isinstance(metric, engine_metrics.Counter):
        return of.one(_COUNTER, name, name, metric.value)
    if isinstance(metric, engine_metrics.Histogram):
        steps = HistogramMetricFamily(name, "Tokens of a step.", labels=_LABELS)
        steps.add_metric(of.values, list(metric.buckets.items()), metric.sum)
        return steps
    assert isinstance(metric, engine_metrics.Vector), type(metric)
    rows = [((str(position),), value) for position, value in enumerate(metric.values)]
    return of.many(_COUNTER, name, name, ("position",), rows)


@dataclass(slots=True)
class _Siblings:
    """The outputs of one prompt that have not ended, and the longest of those that have."""

    live: int = 0
    most: int = 0


@dataclass(slots=True)
class _Open:
    """A request that has not ended."""

    request: Request
    siblings: _Siblings
    num_tokens: int = 0
    last_at: float | None = None
    """When it was given tokens last."""


class ServerMetrics:
    """Histograms and counts of requests."""

    def __init__(self, engine: Engine, model_name: str, prefix: str = "foretoken") -> None:
        self.registry = CollectorRegistry()
        self._model_name, self._prefix = model_name, prefix
        self.scrape(partial(engine_families, engine))
        deciding = engine.parts.controller
        journal = deciding.journal
        if journal is not None:
            self.scrape(lambda of: control_families(journal.describe(), of))
        if deciding.control is not None:
            self.scrape(lambda of: learnt_families(deciding.models(), of))
        self._open: dict[str, _Open] = {}
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
        self._acceptance = AcceptanceMetrics(self.registry, model_name, prefix)
        ProcessCollector(registry=self.registry)
        self.http = Counter(
            f"{prefix}:http_responses",
            "Answers by path and status.",
            ("path", "status"),
            registry=self.registry,
        )

    def scrape(self, read: Callable[[ScrapedFamilies], Iterable[Metric]]) -> None:
        """Have what `read` gives in every answer, too."""
        self.registry.register(ScrapedFamilies(self._model_name, self._prefix, read))

    def render(self) -> bytes:
        return generate_latest(self.registry)

    def opened(self, requests: Sequence[Request]) -> None:
        by_prompt = defaultdict[str, _Siblings](_Siblings)
        for request in requests:
            name, n = request.request_id, request.params.n
            prompt = name if n == 1 else name.removesuffix(f"-{request.sample_index}")
            by_prompt[prompt].live += 1
            self._open[name] = _Open(request, by_prompt[prompt])
            self._prompt.observe(len(request.prompt_token_ids))
            self._asked.observe(request.max_tokens)
            self._n.observe(request.params.n)

    def observe(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            one = self._open.get(output.request_id)
            if one is None:
                continue
            if output.new_token_ids:
                self._count(one, len(output.new_token_ids))
            if output.finish_reason is not None:
                del self._open[output.request_id]
                self._end(one, output, output.finish_reason)

    def _count(self, one: _Open, num_tokens: int) -> None:
        now = time.monotonic()
        if one.last_at is None:
            self._first_token.observe(now - one.request.arrival)
        else:
            self._between.observe(now - one.last_at)
            self._between_formerly.observe(now - one.last_at)
        one.num_tokens += num_tokens
        one.last_at = now

    def _end(self, one: _Open, output: Output, reason: FinishReason) -> None:
        count, siblings, times = one.num_tokens, one.siblings, output.metrics
        siblings.live, siblings.most = siblings.live - 1, max(siblings.most, count)
        if siblings.live == 0:
            self._longest.observe(siblings.most)
        self._ends.labels(self._model_name, "0", str(reason)).inc()
        facts: dict[str, object] = {
            "id": output.request_id,
            "finish_reason": str(reason),
            "completion_tokens": count,
        }
        if times is not None:
            facts |= {"queued_ms": milliseconds(times.queued_s)}
            facts |= {"ttft_ms": milliseconds(times.first_token_s)}
            facts |= {"e2e_ms": milliseconds(times.finished_s)}
            facts |= {"acceptance_length": round(times.acceptance_length, 3)}
        logger.info("ended", extra={"facts": facts})
        if times is not None:
            self._acceptance.observe(one.request.params.temperature, times)
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
        return family.labels(self._model_name, "0")
