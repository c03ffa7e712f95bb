"""Metrics, log lines, and acceptance as Prometheus sees it."""

import importlib
import json
import logging
import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from foretoken.control.acceptance import temperature_bucket
from foretoken.control.cost import PlainCost
from foretoken.engine.metrics import EngineMetrics, PlainEstimate
from foretoken.errors import ForetokenError, PromptError
from foretoken.server.observing.log_lines import LineFormatter, milliseconds
from foretoken.server.observing.server_metrics import AcceptanceMetrics
from foretoken.types import RequestMetrics, StepStats
from foretoken.v1.metrics.reader import Counter, Gauge, Histogram, Vector


def stats(accepted: tuple[int, ...], drafts: int, drafted: int) -> StepStats:
    return StepStats(
        num_sequences=2, num_tokens=8, num_drafts=drafts, num_draft_tokens=drafted,
        num_accepted_tokens=sum(accepted), num_accepted_tokens_per_pos=accepted,
        num_output_tokens=drafts + sum(accepted), num_waiting=1, drafting_s=0.25, verifying_s=0.5,
        total_s=1.0,
    )  # fmt: skip


def test_sizes_of_steps() -> None:
    metrics = EngineMetrics("m", log_stats=False)
    sizes = ((2, 1), (1,), ())
    for accepted in sizes:
        metrics.record(stats(accepted, drafts=1, drafted=4))
    found = {metric.name: metric for metric in metrics.read()}["vllm:iteration_tokens_total"]
    assert isinstance(found, Histogram)
    tokens = [8 - 4 + 1 + sum(accepted) for accepted in sizes]
    assert (found.count, found.sum) == (3, sum(tokens))
    assert found.buckets["8.0"] == 3 and found.buckets["1.0"] == 0 and found.buckets["+Inf"] == 3


def test_totals_and_positions() -> None:
    metrics = EngineMetrics("m", log_stats=False)
    metrics.record(stats((2, 1), drafts=2, drafted=6))
    metrics.record(stats((1, 1, 1), drafts=1, drafted=3))
    read = {metric.name: metric for metric in metrics.read()}
    values = {n: m.value for n, m in read.items() if isinstance(m, Counter | Gauge)}
    assert values["vllm:spec_decode_num_drafts"] == 3
    assert values["vllm:spec_decode_num_draft_tokens"] == 9
    assert values["vllm:spec_decode_num_accepted_tokens"] == 6
    assert values["foretoken:drafting_seconds"] == 0.5
    assert values["foretoken:verifying_seconds"] == 1.0
    assert values["foretoken:step_seconds"] == 2.0
    assert values["foretoken:acceptance_length"] == 3.0
    assert values["foretoken:draft_acceptance_rate"] == pytest.approx(6 / 9)
    per_pos = read["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_pos, Vector)
    assert per_pos.values == [3, 2, 1]


def test_a_watched_gauge_outlives_a_restart() -> None:
    """Warming up ends with one: what the engine watches is still told afterwards."""
    metrics = EngineMetrics("m", log_stats=False)
    metrics.watch("foretoken:drafter_bytes", lambda: 7.0)
    metrics.record(stats((1,), drafts=1, drafted=3))
    metrics.restart()
    values = {m.name: m.value for m in metrics.read() if isinstance(m, Counter | Gauge)}
    assert values["foretoken:drafter_bytes"] == 7.0
    assert values["foretoken:engine_steps"] == 0


def test_without_drafts_nothing_is_divided_by_zero() -> None:
    metrics = EngineMetrics("m", log_stats=False)
    values = {m.name: m.value for m in metrics.read() if isinstance(m, Gauge)}
    assert values["foretoken:acceptance_length"] == 1.0
    assert values["foretoken:draft_acceptance_rate"] == 0.0


def step(sequences: int, drafted: int, tokens: int, seconds: float, prompt: int = 0) -> StepStats:
    return replace(
        stats((), drafts=sequences if drafted else 0, drafted=drafted),
        num_sampled=sequences,
        num_tokens=sequences + drafted + prompt,
        num_output_tokens=tokens,
        total_s=seconds,
    )


def test_time_without_speculation_is_estimated_from_plain_steps() -> None:
    cost = PlainEstimate(PlainCost())
    cost.add(step(2, drafted=4, tokens=5, seconds=1.5))
    assert (cost.estimated_s, cost.measured_s) == (0.0, 0.0)  # nothing to compare with yet
    cost.add(step(1, drafted=0, tokens=1, seconds=1.0))
    cost.add(step(1, drafted=0, tokens=1, seconds=9.0, prompt=50))  # a prompt counts for nothing
    assert (cost.estimated_s, cost.measured_s) == (1.0, 1.0)
    cost.add(step(1, drafted=5, tokens=4, seconds=1.5))
    assert (cost.estimated_s, cost.measured_s) == (5.0, 2.5)
    cost.add(step(4, drafted=8, tokens=8, seconds=2.0))  # a smaller batch's cost stands in
    assert cost.estimated_s == 7.0
    assert cost.step_seconds(1) == cost.step_seconds(100) == 1.0


def test_a_larger_batch_stands_in_scaled_down() -> None:
    cost = PlainEstimate(PlainCost())
    cost.add(step(4, drafted=0, tokens=4, seconds=2.0))
    assert cost.step_seconds(1) == 0.5
    assert PlainEstimate(PlainCost()).step_seconds(1) == 0.0


def test_temperatures_have_buckets() -> None:
    found = [temperature_bucket(t) for t in (0.0, 0.1, 0.2, 0.3, 0.7, 1.0, 1.5)]
    assert found == ["0", "0.2", "0.2", "0.5", "0.7", "1", "inf"]


def test_the_log_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = EngineMetrics("m", log_stats=True, log_interval_s=0.0)
    with caplog.at_level(logging.INFO, logger="foretoken"):
        metrics.record(stats((2, 1), drafts=2, drafted=6))
    [record] = caplog.records
    for part in ("acceptance length 2.50", "rate 50.0%", "1.000, 0.500", "drafted", "accepted"):
        assert part in record.getMessage()
    caplog.clear()
    quiet = EngineMetrics("m", log_stats=False, log_interval_s=0.0)
    quiet.record(stats((), drafts=0, drafted=0))
    assert not caplog.records


def test_a_vector_says_that_it_has_values() -> None:
    """vLLM's own example prints `metric.value` of every metric whose name has spec_decode in it."""
    vector = Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, [3, 1])
    with pytest.raises(AttributeError, match=r"is a Vector, .*: use \.values"):
        print(vector.value)
    assert not hasattr(vector, "value") and vector == Vector(vector.name, {}, [3, 1])


@pytest.mark.parametrize("path", ["foretoken.v1.metrics.reader", "foretoken.engine.metrics"])
def test_a_script_for_vllm_imports_the_classes_of_get_metrics(path: str) -> None:
    reader = importlib.import_module(path)
    found = [getattr(reader, name) for name in ("Counter", "Gauge", "Histogram", "Vector")]
    assert found == [Counter, Gauge, Histogram, Vector]
    assert all(issubclass(kind, reader.Metric) for kind in found)


def line(kind: str, message: str, error: Exception | None = None, **facts: object) -> str:
    logger = logging.getLogger("foretoken.test_metrics")
    info = None
    if error is not None:
        try:
            raise error
        except type(error):
            info = sys.exc_info()
    record = logger.makeRecord(
        "foretoken", 40, "x.py", 1, message, (), info, None, {"facts": facts}
    )
    return LineFormatter(kind).format(record)


def test_an_error_of_the_engine_is_one_line_with_its_place() -> None:
    shown = line("text", "a step failed; requests a, b end", RuntimeError("sizes\n(3) and (4)"))
    assert len(shown.splitlines()) == 1
    assert "requests a, b end: RuntimeError: sizes (3) and (4) [test_metrics.py:" in shown
    assert "Traceback" not in shown
    whole = json.loads(line("json", "a step failed", RuntimeError("sizes")))
    assert "Traceback" in whole["exception"] and whole["message"] == "a step failed"


def test_at_debug_the_traceback_follows() -> None:
    logger = logging.getLogger("foretoken")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    try:
        first, *rest = line("text", "a step failed", RuntimeError("sizes")).splitlines()
    finally:
        logger.setLevel(level)
    assert "sizes" in first and "Traceback" in rest[0]


def test_a_mistake_of_a_user_is_only_its_words() -> None:
    error: ForetokenError = PromptError("prompt", "", "at least one token")
    shown = line("text", "refused", error)
    assert shown.endswith("refused: prompt: got ''; allowed: at least one token")


def test_numbers_are_short() -> None:
    shown = line("text", "ended", queued_ms=milliseconds(0.009934337999766285), tokens=20, id="a")
    assert shown.endswith("ended queued_ms=9.93 tokens=20 id=a")


def ended(accepted: tuple[int, ...], drafters: tuple[str, ...]) -> RequestMetrics:
    return RequestMetrics(
        queued_s=0.0, first_token_s=0.1, finished_s=1.0, num_preemptions=0, num_cached_tokens=0,
        drafted_per_step=(4,) * len(accepted), accepted_per_step=accepted,
        drafter_per_step=drafters,
    )  # fmt: skip


def test_by_drafter_and_temperature() -> None:
    registry = CollectorRegistry()
    metrics = AcceptanceMetrics(registry, ("m", "0"))
    metrics.observe(0.0, ended((4, 0, 2), ("ngram", "draft_model", "ngram")))
    metrics.observe(0.0, ended((), ()))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})

    ngram = {"drafter": "ngram", "temperature": "0"}
    assert value("foretoken:drafter_draft_tokens_total", **ngram) == 8
    assert value("foretoken:drafter_accepted_tokens_total", **ngram) == 6
    assert value("foretoken:request_acceptance_length_sum", **ngram) == 4.0
    other = {"drafter": "draft_model", "temperature": "0"}
    assert value("foretoken:request_acceptance_length_sum", **other) == 1.0
    assert value("foretoken:acceptance_length_requests", temperature="0") == 1
    assert value("foretoken:acceptance_length_quantile", temperature="0", quantile="0.5") == 3.0
    assert value("foretoken:acceptance_length_requests", temperature="inf") == 0
    assert value("foretoken:acceptance_length_quantile", temperature="1", quantile="0.5") is None


def test_quantiles() -> None:
    registry = CollectorRegistry()
    metrics = AcceptanceMetrics(registry, ("m", "0"))
    for accepted in range(11):
        metrics.observe(0.9, ended((accepted,), ("ngram",)))
    labels = {"model_name": "m", "engine": "0", "temperature": "1"}
    found = [
        registry.get_sample_value(
            "foretoken:acceptance_length_quantile", {**labels, "quantile": quantile}
        )
        for quantile in ("0.1", "0.5", "0.9")
    ]
    assert found == [2.0, 6.0, 10.0]
