"""From the records of an arm to its summary. Pure; errors and warm-up are counted, not averaged."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.lab.analysis.buckets import summarize_acceptance
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import ArmSummary, Quantiles, RequestRecord, ServerInfo
from foretoken.lab.stats.intervals import (
    Floats,
    Interval,
    quantile_interval,
    share_interval,
    unknown,
)
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    Sample,
    clustered_interval,
    supports_quantile,
    weighted_mean,
    weighted_quantile,
)
from foretoken.lab.stats.steady import is_steady

Value = Callable[[RequestRecord], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmData:
    """What is known of an arm beside its requests."""

    arm: str
    server: ServerInfo
    seconds_of_block: dict[int, float]
    counters: dict[str, float]
    gauges: dict[str, float]
    in_flight: int = 0
    """Of a closed loop; 0: an open one."""
    notes: tuple[str, ...] = ()


def sample_of(records: Sequence[RequestRecord], value: Value) -> Sample:
    """A value per request with its block."""
    return Sample(
        np.array([value(r) for r in records], np.float64),
        np.array([r.block for r in records], np.int64),
    )


def counted(records: Sequence[RequestRecord], arm: str) -> list[RequestRecord]:
    """An arm's whole answers after the warm-up, in order of arrival."""
    own = [r for r in records if r.arm == arm and r.ok and not r.warm_up]
    return sorted(own, key=lambda r: (r.block, r.scheduled_s, r.index))


def rates_per_block(records: Sequence[RequestRecord], data: ArmData, value: Value) -> Sample:
    """Sum of a value over each block per second of it."""
    sums: dict[int, float] = defaultdict(float)
    for record in records:
        sums[record.block] += value(record)
    blocks = sorted(data.seconds_of_block)
    rates = [sums[block] / max(data.seconds_of_block[block], 1e-9) for block in blocks]
    return Sample(np.array(rates, np.float64), np.array(blocks, np.int64))


def is_good(record: RequestRecord, levels: ServiceLevels) -> bool:
    """Whether a whole answer met every service level; a TPOT that is not defined is met."""
    pairs = (
        (levels.ttft_s, record.ttft_s),
        (levels.tpot_s, record.tpot_s),
        (levels.e2e_s, record.e2e_s),
    )
    return record.ok and not any(limit is not None and value > limit for limit, value in pairs)


def output_tokens(record: RequestRecord) -> float:
    """Tokens of an answer; 0 if the server does not say."""
    return float(record.output_tokens or 0)


def summarize_arm(
    records: Sequence[RequestRecord], data: ArmData, levels: ServiceLevels
) -> ArmSummary:
    """The summary of an arm."""
    own = [r for r in records if r.arm == data.arm and not r.warm_up]
    good = counted(records, data.arm)
    errors = Counter((r.error or "no text").split(":")[0] for r in own if not r.ok)
    seconds = sum(data.seconds_of_block.values())
    met = [r for r in good if is_good(r, levels)]
    lags = [r.sent_s - r.scheduled_s for r in good if r.sent_s is not None]
    latencies = np.array([r.e2e_s for r in good])
    return ArmSummary(
        arm=data.arm,
        server=data.server,
        num_requests=len(own),
        num_errors=sum(errors.values()),
        errors=dict(errors),
        duration_s=seconds,
        output_tokens=int(sum(map(output_tokens, good))),
        tokens_per_s=_rate(good, data, output_tokens),
        requests_per_s=len(good) / seconds if seconds else math.nan,
        goodput_per_s=_rate(met, data, lambda _: 1.0) if levels.any else None,
        attained=share_interval(len(met), len(own)) if levels.any else None,
        ttft=_quantiles(good, lambda r: r.ttft_s),
        tpot=_quantiles(good, lambda r: r.tpot_s),
        e2e=_quantiles(good, lambda r: r.e2e_s),
        acceptance=summarize_acceptance(good),
        counters=data.counters,
        gauges=data.gauges,
        parameters_seen=_parameters(own),
        steady=_steady(good, data.in_flight) if latencies.size else True,
        client_lag_p99_s=float(np.quantile(lags, 0.99)) if lags else 0.0,
        notes=data.notes,
    )


def _rate(records: Sequence[RequestRecord], data: ArmData, value: Value) -> Interval:
    rates = rates_per_block(records, data, value)
    if rates.values_N.size < FEWEST_BLOCKS:
        total = sum(map(value, records)) / max(sum(data.seconds_of_block.values()), 1e-9)
        return unknown(total)
    return clustered_interval(rates, weighted_mean)


def _quantiles(records: Sequence[RequestRecord], value: Value) -> Quantiles | None:
    sample = sample_of(records, value).known()
    if sample.values_N.size == 0:
        return None
    p50, p95, p99 = (_quantile(sample, q) for q in (0.5, 0.95, 0.99))
    return Quantiles(mean=_mean(sample), p50=p50, p95=p95, p99=p99)


def _quantile(sample: Sample, q: float) -> Interval:
    """By blocks where there are enough, else as if requests were independent."""
    if np.unique(sample.blocks_N).size >= FEWEST_BLOCKS and supports_quantile(sample, q):
        return clustered_interval(sample, weighted_quantile(q))
    return quantile_interval(sample.values_N, q)


def _mean(sample: Sample) -> Interval:
    if np.unique(sample.blocks_N).size >= FEWEST_BLOCKS:
        return clustered_interval(sample, weighted_mean)
    own = Sample(sample.values_N, np.arange(sample.values_N.size))
    return clustered_interval(own, weighted_mean)


def _steady(records: Sequence[RequestRecord], in_flight: int) -> bool:
    """Whether latency settles inside blocks: their course is averaged over blocks first.

    A closed loop begins with all its requests at once and ends with fewer and fewer: neither is
    a drift.
    """
    blocks: dict[int, list[float]] = defaultdict(list)
    for record in records:
        blocks[record.block].append(record.e2e_s)
    shortest = min(map(len, blocks.values()), default=0)
    if shortest == 0:
        return True
    course: Floats = np.mean([np.asarray(v[:shortest]) for v in blocks.values()], axis=0)
    return is_steady(course[in_flight : course.size - in_flight])


def _parameters(records: Sequence[RequestRecord]) -> dict[str, int]:
    seen: Counter[str] = Counter()
    for record in records:
        seen.update(name for name, value in record.parameters.items() if value is not None)
        seen.update(["temperature"] if record.temperature is not None else [])
    return dict(sorted(seen.items()))
