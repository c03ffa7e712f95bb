"""From the records of a run to its summary: times, rates, acceptance and gains. Pure.

Errors and warm-up are counted, not averaged. Acceptance is by temperature, class and length of
output, noise taken out. Requests are its clusters: within one, steps depend on each other. Buckets
come with how many requests had too few steps to say anything about their own rate.

Gains are over requests that both arms answered: for times baseline / candidate, for rates candidate
/ baseline, so that above 1 is better. A class is a category, a temperature or a length of prompt,
where the traffic has several. The requests of a class ran among all others, so what is found is its
gain in this mix.
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
    ArmGain,
    ArmSummary,
    ClassGains,
    Equality,
    Quantiles,
    RequestAcceptance,
    RequestRecord,
    ServerInfo,
)
from foretoken.lab.stats.intervals import (
    Floats,
    Interval,
    as_share,
    quantile_interval,
    share_interval,
    unknown,
)
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    RESTART_SD,
    Sample,
    Statistic,
    WeightedQuantile,
    clustered_interval,
    paired_ratio,
    ratio_of_blocks,
    supports_blocks,
    supports_quantile,
    weighted_mean,
    whole,
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
    p10, p90 = map(as_share, request_quantiles(rates, steps, within, (0.1, 0.9)))
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
        rate=as_share(_ratio(accepted, drafted)),
        length=length,
        p10=p10,
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


_TIMES: dict[str, Value] = {
    "tpot": lambda r: r.tpot_s,
    "ttft": lambda r: r.ttft_s,
    "e2e": lambda r: r.e2e_s,
}
STATISTICS: dict[str, float | None] = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "mean": None}


def pair(
    records: Sequence[RequestRecord], names: tuple[str, str]
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Answers of both arms to the same requests, in the same order."""
    arms = [{(r.block, r.index): r for r in counted(records, name)} for name in names]
    common = sorted(arms[0].keys() & arms[1].keys())
    return [arms[0][key] for key in common], [arms[1][key] for key in common]


def compute_gains(
    records: Sequence[RequestRecord],
    data: tuple[ArmData, ArmData],
    levels: ServiceLevels,
) -> tuple[ArmGain, ...]:
    """Every gain; `data` is the baseline's and the candidate's. `tpot_total` is of all time after
    first tokens over all tokens then, `goodput` needs service levels."""
    base, other = pair(records, (data[0].arm, data[1].arm))
    if not base:
        return ()
    unseen = unseen_starts(data)
    gains = []
    for name, value in _TIMES.items():
        samples = sample_of(base, value), sample_of(other, value)
        gains += [time_gain(f"{name}_{suffix}", samples, unseen) for suffix in STATISTICS]
    gains.append(_gain("tpot_total", _per_token(base, other), weighted_mean, unseen))
    gains.append(_rate_gain("tokens_per_s", records, data, output_tokens))
    if levels.any:
        good = [r for r in records if is_good(r, levels)]
        gains.append(_rate_gain("goodput", good, data, lambda _: 1.0))
    return tuple(gains)


def _per_token(
    base: Sequence[RequestRecord], other: Sequence[RequestRecord]
) -> tuple[Sample, Sample]:
    """Seconds per token of each block: all time after first tokens over all tokens then."""
    both = zip(base, other, strict=True)
    pairs = [(a, b) for a, b in both if math.isfinite(a.tpot_s) and math.isfinite(b.tpot_s)]
    of_pair = np.array([a.block for a, _ in pairs], np.int64)
    blocks, place = np.unique(of_pair, return_inverse=True)
    samples = []
    for arm in (0, 1):
        own = [answers[arm] for answers in pairs]
        seconds = np.bincount(place, [r.tpot_s * r.tokens_after_first for r in own], blocks.size)
        tokens = np.bincount(place, [r.tokens_after_first for r in own], blocks.size)
        samples.append(Sample(seconds / tokens, blocks))
    return samples[0], samples[1]


def unseen_starts(data: tuple[ArmData, ArmData]) -> float:
    """Spread of the logarithm of a ratio by starts that no block shows. A server that nothing
    restarts is one start, however many blocks it answers; both arms on one server share theirs."""
    given = [own.server for own in data if not own.server.starts_anew]
    if len(given) == 2 and given[0].url == given[1].url:
        return 0.0
    return RESTART_SD * math.sqrt(len(given))


def time_gain(metric: str, samples: tuple[Sample, Sample], unseen_sd: float = 0.0) -> ArmGain:
    """The gain in a time, such as `tpot_p95`, of the baseline's and the candidate's requests."""
    q = STATISTICS[metric.rsplit("_", 1)[-1]]
    statistic = weighted_mean if q is None else WeightedQuantile(q)
    return _gain(metric, samples, statistic, unseen_sd, q)


def _gain(
    metric: str,
    samples: tuple[Sample, Sample],
    statistic: Statistic,
    unseen_sd: float,
    q: float | None = None,
) -> ArmGain:
    known_N = np.isfinite(samples[0].values_N) & np.isfinite(samples[1].values_N)
    top, bottom = (Sample(s.values_N[known_N], s.blocks_N[known_N]) for s in samples)
    by_block = []
    for block in np.unique(top.blocks_N):
        parts = [s.values_N[s.blocks_N == block] for s in (top, bottom)]
        if parts[1].size:
            up, down = (whole(statistic, Sample(p, np.zeros(p.size, np.int64))) for p in parts)
            by_block.append(up / down if down > 0 else math.nan)
    if q is not None and supports_blocks(top, q):
        ratio = ratio_of_blocks(np.array(by_block), unseen_sd=unseen_sd)
    else:
        ratio = paired_ratio(top, bottom, statistic, unseen_sd=unseen_sd)
    blocks = int(np.unique(top.blocks_N).size)
    return ArmGain(
        metric=metric,
        ratio=ratio,
        num_blocks=blocks,
        num_pairs=int(top.values_N.size),
        enough=blocks >= FEWEST_BLOCKS and (q is None or supports_quantile(top, q)),
        ratio_by_block=tuple(by_block),
    )


def _rate_gain(
    metric: str, records: Sequence[RequestRecord], data: tuple[ArmData, ArmData], value: Value
) -> ArmGain:
    base, other = (rates_per_block(counted(records, d.arm), d, value) for d in data)
    return _gain(metric, (other, base), weighted_mean, unseen_starts(data))


def compare_texts(records: Sequence[RequestRecord], names: tuple[str, str]) -> Equality:
    base, other = pair(records, names)
    fixed = [
        (a, b)
        for a, b in zip(base, other, strict=True)
        if (a.temperature == 0.0 or "seed" in a.parameters) and a.text_hash is not None
    ]
    equal = sum(a.text_hash == b.text_hash for a, b in fixed)
    share = share_interval(equal, len(fixed)) if fixed else None
    return Equality(num_compared=len(fixed), num_equal=equal, share=share)


PROMPT_EDGES = (256, 1024, 4096, 8192, 16384, 32768, 65536)
"""Tokens of a prompt at which a longer context begins."""
FEWEST_REQUESTS = 8
"""Requests of a class, per arm, below which nothing is said about it."""


def gains_by_class(
    records: Sequence[RequestRecord], data: tuple[ArmData, ArmData]
) -> tuple[ClassGains, ...]:
    """Gains in time of every class; nothing by what all requests have alike. Where two keys tell
    the same requests apart, as a temperature for each category does, the first of them counts."""
    found, seen = [], []
    keys: dict[str, Key] = {
        "category": lambda r: r.category,
        "temperature": temperature_key(records),
        "context": lambda r: (
            "" if r.prompt_tokens is None else f"{range_of(r.prompt_tokens, PROMPT_EDGES)} tokens"
        ),
    }
    counting = [r for r in records if r.ok and not r.warm_up]
    for by, key in keys.items():
        groups: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in counting:
            groups[key(record)].append(record)
        groups.pop("", None)
        if len(groups) < 2:
            continue
        apart = {frozenset((r.block, r.index) for r in own) for own in groups.values()}
        if apart in seen:
            continue
        seen.append(apart)
        every = [
            _times_of(by, value, compute_gains(own, data, ServiceLevels()))
            for value, own in sorted(groups.items(), key=lambda group: order_of(group[0]))
        ]
        found += [own for own in every if own.num_pairs >= FEWEST_REQUESTS]
    return tuple(found)


def _times_of(by: str, value: str, gains: Sequence[ArmGain]) -> ClassGains:
    times = tuple(g for g in gains if g.metric.startswith(("tpot_", "ttft_", "e2e_")))
    num = times[0].num_pairs if times else 0
    return ClassGains(by=by, value=value, num_pairs=num, gains=times)
