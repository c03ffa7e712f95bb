"""From the records of an arm to its summary: times, rates, and acceptance in buckets.

Errors and warm-up are counted, not averaged. Acceptance is by temperature, class and length of
output, noise taken out. Requests are its clusters: within one, steps depend on each other. Buckets
come with how many requests had too few steps to say anything about their own rate. Pure.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from foretoken.control.acceptance import TEMPERATURE_EDGES, temperature_bucket
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import (
    AcceptanceBucket,
    ArmSummary,
    Quantiles,
    RequestAcceptance,
    RequestRecord,
    ServerInfo,
)
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
    WeightedQuantile,
    clustered_interval,
    supports_quantile,
    weighted_mean,
)
from foretoken.lab.stats.shrinkage import request_quantiles
from foretoken.lab.stats.steady import is_steady

Value = Callable[[RequestRecord], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmData:
    arm: str
    server: ServerInfo
    seconds_of_block: dict[int, float]
    counters: dict[str, float]
    gauges: dict[str, float]
    in_flight: int = 0
    """Requests in flight of a closed loop; 0: an open loop."""
    notes: tuple[str, ...] = ()


def sample_of(records: Sequence[RequestRecord], value: Value) -> Sample:
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
    names = ("ttft_s", "tpot_s", "e2e_s")
    limits = ((getattr(levels, name), getattr(record, name)) for name in names)
    return record.ok and not any(most is not None and value > most for most, value in limits)


def output_tokens(record: RequestRecord) -> float:
    return float(record.output_tokens or 0)


def summarize_arm(
    records: Sequence[RequestRecord], data: ArmData, levels: ServiceLevels
) -> ArmSummary:
    own = [r for r in records if r.arm == data.arm and not r.warm_up]
    good = counted(records, data.arm)
    errors = Counter((r.error or "no text").split(":")[0] for r in own if not r.ok)
    seconds = sum(data.seconds_of_block.values())
    met = [r for r in good if is_good(r, levels)]
    lags = [r.sent_s - r.scheduled_s for r in good if r.sent_s is not None]
    prompts = [r.prompt_tokens for r in good if r.prompt_tokens is not None]
    return ArmSummary(
        arm=data.arm,
        server=data.server,
        num_requests=len(own),
        num_errors=sum(errors.values()),
        errors=dict(errors),
        duration_s=seconds,
        output_tokens=int(sum(map(output_tokens, good))),
        prompt_tokens=float(np.mean(prompts)) if prompts else None,
        tokens_per_s=_rate(good, data, output_tokens),
        requests_per_s=len(good) / seconds if seconds else math.nan,
        goodput_per_s=_rate(met, data, lambda _: 1.0) if levels.any else None,
        attained=share_interval(len(met), len(own)) if levels.any else None,
        ttft=_quantiles(good, lambda r: r.ttft_s),
        tpot=_quantiles(good, lambda r: r.tpot_s),
        e2e=_quantiles(good, lambda r: r.e2e_s),
        acceptance=summarize_acceptance(good),
        num_told=sum(r.acceptance is not None for r in good),
        counters=data.counters,
        gauges=data.gauges,
        parameters_seen=_parameters(own),
        steady=_steady(good, data.in_flight),
        client_lag_p99_s=float(np.quantile(lags, 0.99)) if lags else 0.0,
        notes=data.notes,
    )


def _rate(records: Sequence[RequestRecord], data: ArmData, value: Value) -> Interval:
    rates = rates_per_block(records, data, value)
    if rates.values_N.size < FEWEST_BLOCKS:
        return unknown(sum(map(value, records)) / max(sum(data.seconds_of_block.values()), 1e-9))
    return clustered_interval(rates, weighted_mean)


def _quantiles(records: Sequence[RequestRecord], value: Value) -> Quantiles | None:
    sample = sample_of(records, value).known()
    if sample.values_N.size == 0:
        return None
    by_block = np.unique(sample.blocks_N).size >= FEWEST_BLOCKS
    # With too few blocks for an interval it is as if requests were independent.
    own = sample if by_block else Sample(sample.values_N, np.arange(sample.values_N.size))
    p50, p95, p99 = (
        clustered_interval(sample, WeightedQuantile(q))
        if by_block and supports_quantile(sample, q)
        else quantile_interval(sample.values_N, q)
        for q in (0.5, 0.95, 0.99)
    )
    return Quantiles(mean=clustered_interval(own, weighted_mean), p50=p50, p95=p95, p99=p99)


def _steady(records: Sequence[RequestRecord], in_flight: int) -> bool:
    """Whether latency settles inside blocks: their course is averaged over blocks first. A closed
    loop begins with all its requests at once and ends with fewer and fewer: neither is a drift."""
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


FEWEST_STEPS = 3
FEWEST_STEPS_OF_ALL = 200
"""Verifications of an arm below which its acceptance is marked: a share of 0.5 is then known to
about a tenth."""
_LENGTHS = (20, 50, 100, 200, 500, 1000)

Key = Callable[[RequestRecord], str]


def summarize_acceptance(records: Sequence[RequestRecord]) -> tuple[AcceptanceBucket, ...]:
    found: list[AcceptanceBucket] = []
    keys: dict[str, Key] = {
        "all": lambda _: "all",
        "temperature": temperature_key(records),
        "category": lambda record: record.category,
        "output_tokens": lambda record: range_of(record.output_tokens or 0, _LENGTHS),
    }
    for by, key in keys.items():
        groups: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in records:
            if record.acceptance is not None and record.acceptance.num_drafted > 0:
                groups[key(record)].append(record)
        if by == "category" and set(groups) == {""}:
            continue
        found += [_bucket(by, value, groups[value]) for value in sorted(groups, key=order_of)]
    return tuple(found)


def order_of(value: str) -> tuple[float, str]:
    """Classes that are numbers in their order, after all others."""
    head = value.split("-")[0].split(" ")[0].strip("<>=")
    try:
        return float(head), value
    except ValueError:
        return -math.inf, value


def range_of(tokens: int, edges: Sequence[int]) -> str:
    """`21-50`, or `>1000` above the last edge."""
    for low, high in zip((0, *edges), edges, strict=False):
        if tokens <= high:
            return f"{low + 1}-{high}"
    return f">{edges[-1]}"


def temperature_key(records: Sequence[RequestRecord]) -> Key:
    """Each temperature by itself if there are few, as in a grid; else the server's buckets."""
    several = len({record.temperature for record in records}) > len(TEMPERATURE_EDGES) + 1

    def key(record: RequestRecord) -> str:
        if record.temperature is None:
            return "default"
        if not several:
            return f"{record.temperature:g}"
        edge = temperature_bucket(record.temperature)
        return f">{TEMPERATURE_EDGES[-1]:g}" if edge == "inf" else f"<={edge}"

    return key


def _bucket(by: str, value: str, records: Sequence[RequestRecord]) -> AcceptanceBucket:
    found = [r.acceptance for r in records if r.acceptance is not None]
    drafted = np.array([a.num_drafted for a in found], np.float64)
    accepted = np.array([a.num_accepted for a in found], np.float64)
    long_enough = [a for a in found if _steps(a) >= FEWEST_STEPS]
    rates = np.array([a.rate for a in long_enough])
    steps = np.array([_steps(a) for a in long_enough], np.float64)
    within = np.array([_variance(a) for a in long_enough], np.float64)
    p10, p50, p90 = request_quantiles(rates, steps, within, (0.1, 0.5, 0.9))
    known_steps = [a.num_steps for a in found if a.num_steps is not None]
    length = None
    if all(a.num_steps for a in found):
        counts = np.array(known_steps, np.float64)
        length = _ratio(accepted + counts, counts)
    return AcceptanceBucket(
        by=by,
        value=value,
        num_requests=len(found),
        num_drafted=int(drafted.sum()),
        num_accepted=int(accepted.sum()),
        num_steps=sum(known_steps) if len(known_steps) == len(found) else None,
        rate=_ratio(accepted, drafted),
        length=length,
        p10=p10,
        p50=p50,
        p90=p90,
        raw_p10=float(np.quantile(rates, 0.1)) if rates.size else float("nan"),
        num_too_short=len(found) - len(long_enough),
        histogram=tuple(map(sum, zip_longest(*(a.histogram for a in found), fillvalue=0))),
        exact=all(a.exact for a in found),
    )


def _ratio(top: Floats, bottom: Floats) -> Interval:
    """Ratio of sums with requests drawn again: the mean of top weighted by bottom."""
    point = float(top.sum() / bottom.sum())
    clusters = np.arange(top.size)

    def ratio(values: Floats, weights: Floats) -> Floats:
        return (weights @ values) / (weights @ bottom)

    if top.size < 3 or point <= 0:
        return unknown(point)
    return clustered_interval(Sample(top, clusters), ratio)


def _steps(found: RequestAcceptance | AcceptanceBucket) -> float:
    """Verifications; where the server does not say, one per five drafts."""
    return float(found.num_steps if found.num_steps is not None else found.num_drafted / 5)


def _variance(found: RequestAcceptance) -> float:
    """Variance of a step's rate around its request's, from steps, else from the histogram."""
    if found.per_step_accepted and len(found.per_step_drafted) == len(found.per_step_accepted):
        drafted = np.maximum(np.array(found.per_step_drafted, np.float64), 1.0)
        rates = np.array(found.per_step_accepted) / drafted
    elif found.histogram and found.num_steps:
        k = found.num_drafted / found.num_steps
        rates = np.repeat(np.arange(len(found.histogram)) / k, found.histogram)
    else:
        return max(found.rate * (1 - found.rate), 1e-6)
    return float(rates.var(ddof=1)) if rates.size > 1 else float("nan")


def num_verifications(arm: ArmSummary) -> int:
    return int(_steps(arm.all_drafts)) if arm.all_drafts is not None else 0


def enough_drafts(arm: ArmSummary) -> bool:
    return num_verifications(arm) >= FEWEST_STEPS_OF_ALL
