"""How much better the candidate is, over requests that both arms answered. Pure.

For times a gain is baseline / candidate, for rates candidate / baseline: above 1 is better.

A class is a category, a temperature or a length of prompt, where the traffic has several. The
requests of a class ran among all others, so what is found is its gain in this mix.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foretoken.lab.analysis.summary import (
    ArmData,
    Key,
    Value,
    counted,
    is_good,
    order_of,
    output_tokens,
    range_of,
    rates_per_block,
    sample_of,
    temperature_key,
)
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import (
    ArmGain,
    ArmSummary,
    ClassGains,
    Equality,
    RequestRecord,
)
from foretoken.lab.stats.intervals import Interval, share_interval
from foretoken.lab.stats.ratios import (
    FEWEST_BLOCKS,
    RESTART_SD,
    Sample,
    Statistic,
    WeightedQuantile,
    blocks_for_width,
    paired_ratio,
    ratio_of_blocks,
    supports_blocks,
    supports_quantile,
    weighted_mean,
    whole,
)

NARROW = 0.05
"""Half width, as a share, that `needed_blocks` is about."""
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
    prices: dict[str, float],
) -> tuple[ArmGain, ...]:
    """Every gain; `data` is the baseline's and the candidate's. `tpot_total` is of all time after
    first tokens over all tokens then, `goodput` needs service levels, and `cost` prices."""
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
    if all(prices.get(d.arm) for d in data):
        factor = prices[data[0].arm] / prices[data[1].arm]
        rate = next(gain for gain in gains if gain.metric == "tokens_per_s")
        gains.append(replace(rate, metric="cost", ratio=rate.ratio.scaled(factor)))
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
    pairs, by_block = int(top.values_N.size), []
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
    needed = blocks_for_width(ratio, blocks, NARROW)
    if needed is not None and q is not None and pairs:
        # Enough values beyond a quantile, too.
        needed = max(needed, math.ceil(10 / min(q, 1 - q) * blocks / pairs))
    return ArmGain(
        metric=metric,
        ratio=ratio,
        num_blocks=blocks,
        num_pairs=pairs,
        enough=blocks >= FEWEST_BLOCKS and (q is None or supports_quantile(top, q)),
        needed_blocks=needed,
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


def cost_of(arms: tuple[ArmSummary, ArmSummary], prices: dict[str, float]) -> dict[str, Interval]:
    """Price of a million output tokens per arm that has a price per hour."""
    found = {}
    for arm in arms:
        rate, price = arm.tokens_per_s, prices.get(arm.arm)
        if price and rate.estimate > 0:
            scale = price / 3600 * 1e6
            high = scale / rate.low if rate.low > 0 else float("inf")
            low = scale / rate.high if rate.high > 0 else 0.0
            found[arm.arm] = Interval(scale / rate.estimate, low, high, rate.level)
    return found


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
            times_of(by, value, compute_gains(own, data, ServiceLevels(), {}))
            for value, own in sorted(groups.items(), key=lambda group: order_of(group[0]))
        ]
        found += [own for own in every if own.num_pairs >= FEWEST_REQUESTS]
    return tuple(found)


def times_of(by: str, value: str, gains: Sequence[ArmGain]) -> ClassGains:
    times = tuple(g for g in gains if g.metric.startswith(("tpot_", "ttft_", "e2e_")))
    num = times[0].num_pairs if times else 0
    return ClassGains(by=by, value=value, num_pairs=num, gains=times)
