"""Metrics in the shape of vLLM's reader, and the log line."""

import logging

import pytest

from foretoken.metrics import Counter, EngineMetrics, Gauge, Vector
from foretoken.types import StepStats


def stats(accepted: tuple[int, ...], drafts: int, drafted: int) -> StepStats:
    return StepStats(
        num_sequences=2,
        num_tokens=8,
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(accepted),
        num_accepted_tokens_per_pos=accepted,
        num_output_tokens=drafts + sum(accepted),
        num_waiting=1,
        drafting_s=0.25,
        verifying_s=0.5,
        total_s=1.0,
    )


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
    assert values["foretoken:acceptance_length"] == 3.0
    assert values["foretoken:draft_acceptance_rate"] == pytest.approx(6 / 9)
    per_pos = read["vllm:spec_decode_num_accepted_tokens_per_pos"]
    assert isinstance(per_pos, Vector)
    assert per_pos.values == [3, 2, 1]


def test_without_drafts_nothing_is_divided_by_zero() -> None:
    metrics = EngineMetrics("m", log_stats=False)
    values = {m.name: m.value for m in metrics.read() if isinstance(m, Gauge)}
    assert values["foretoken:acceptance_length"] == 1.0
    assert values["foretoken:draft_acceptance_rate"] == 0.0


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
