"""How much better the candidate is, over requests that both arms answered. Pure.

For times a gain is baseline / candidate, for rates candidate / baseline: above 1 is better.

A class is a category, a temperature or a length of prompt, where the traffic has several. The
requests of a class ran among all others, so what is found is its gain in this mix.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from foretoken.lab.analysis.summary import (
    ArmData,
    Value,
    counted,
    is_good,
    output_tokens,
    rates_per_block,
    sample_of,
    temperature_key,
)
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import (
    AbSummary,
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
    blocks_for_width,
    paired_ratio,
    ratio_of_blocks,
    supports_blocks,
    supports_quantile,
    weighted_mean,
    weighted_quantile,
    whole,
)

NARROW = 0.05
"""Half width, as a share, that `needed_blocks` is about."""
_TIMES: dict[str, Value] = {
    "tpot": lambda r: r.tpot_s,
    "ttft": lambda r: r.ttft_s,
    "e2e": lambda r: r.e2e_s,
}
_STATISTICS: dict[str, float | None] = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "mean": None}


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
    """Every gain; `data` is the baseline's and the candidate's.

    `tpot_total` is of all time after first tokens over all tokens then, `goodput` needs service
    levels, and `cost` prices.
    """
    base, other = pair(records, (data[0].arm, data[1].arm))
    if not base:
        return ()
    unseen = unseen_starts(data)
    gains = []
    for name, value in _TIMES.items():
        samples = sample_of(base, value), sample_of(other, value)
        gains += [time_gain(f"{name}_{suffix}", samples, unseen) for suffix in _STATISTICS]
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
    pairs = [
        (a, b)
        for a, b in zip(base, other, strict=True)
        if math.isfinite(a.tpot_s) and math.isfinite(b.tpot_s)
    ]
    blocks = np.array(sorted({a.block for a, _ in pairs}), np.int64)
    samples = []
    for arm in (0, 1):
        seconds: dict[int, float] = defaultdict(float)
        tokens: dict[int, int] = defaultdict(int)
        for both in pairs:
            own = both[arm]
            seconds[own.block] += own.tpot_s * own.tokens_after_first
            tokens[own.block] += own.tokens_after_first
        values = [seconds[block] / tokens[block] for block in blocks.tolist()]
        samples.append(Sample(np.array(values, np.float64), blocks))
    return samples[0], samples[1]


def unseen_starts(data: tuple[ArmData, ArmData]) -> float:
    """Spread of the logarithm of a ratio by starts that no block shows.

    A server that nothing restarts is one start, however many blocks it answers; both arms on one
    server share theirs.
    """
    given = [own.server for own in data if not own.server.starts_anew]
    if len(given) == 2 and given[0].url == given[1].url:
        return 0.0
    return RESTART_SD * math.sqrt(len(given))


def time_gain(metric: str, samples: tuple[Sample, Sample], unseen_sd: float = 0.0) -> ArmGain:
    """The gain in a time, such as `tpot_p95`, of the baseline's and the candidate's requests."""
    q = _STATISTICS[metric.rsplit("_", 1)[-1]]
    statistic = weighted_mean if q is None else weighted_quantile(q)
    return _gain(metric, samples, statistic, unseen_sd, q)


def _gain(
    metric: str,
    samples: tuple[Sample, Sample],
    statistic: Statistic,
    unseen_sd: float,
    q: float | None = None,
) -> ArmGain:
    """The gain of a pair of samples; the first is on top of the ratio."""
    known_N = np.isfinite(samples[0].values_N) & np.isfinite(samples[1].values_N)
    top, bottom = (Sample(s.values_N[known_N], s.blocks_N[known_N]) for s in samples)
    by_block = _by_block(top, bottom, statistic)
    if q is not None and supports_blocks(top, q):
        ratio = ratio_of_blocks(np.array(by_block), unseen_sd=unseen_sd)
    else:
        ratio = paired_ratio(top, bottom, statistic, unseen_sd=unseen_sd)
    blocks = int(np.unique(top.blocks_N).size)
    enough = blocks >= FEWEST_BLOCKS
    if q is not None:
        enough = enough and supports_quantile(top, q)
    return ArmGain(
        metric=metric,
        ratio=ratio,
        num_blocks=blocks,
        num_pairs=int(top.values_N.size),
        enough=enough,
        needed_blocks=_needed(ratio, blocks, q, top.values_N.size),
        ratio_by_block=by_block,
    )


def _needed(ratio: Interval, blocks: int, q: float | None, pairs: int) -> int | None:
    """For a narrow interval, and for enough values beyond a quantile."""
    narrow = blocks_for_width(ratio, blocks, NARROW)
    if narrow is None or q is None or pairs == 0:
        return narrow
    beyond = 10 / min(q, 1 - q) * blocks / pairs
    return max(narrow, int(np.ceil(beyond)))


def _by_block(top: Sample, bottom: Sample, statistic: Statistic) -> tuple[float, ...]:
    ratios = []
    for block in np.unique(top.blocks_N):
        parts = [s.values_N[s.blocks_N == block] for s in (top, bottom)]
        if parts[0].size and parts[1].size:
            up, down = (whole(statistic, Sample(p, np.zeros(p.size, np.int64))) for p in parts)
            ratios.append(up / down if down > 0 else math.nan)
    return tuple(ratios)


def _rate_gain(
    metric: str, records: Sequence[RequestRecord], data: tuple[ArmData, ArmData], value: Value
) -> ArmGain:
    base, other = (rates_per_block(counted(records, d.arm), d, value) for d in data)
    return _gain(metric, (other, base), weighted_mean, unseen_starts(data))


def compare_texts(records: Sequence[RequestRecord], names: tuple[str, str]) -> Equality:
    """Equality of the texts of greedy and seeded requests."""
    base, other = pair(records, names)
    fixed = [
        (a, b)
        for a, b in zip(base, other, strict=True)
        if (a.temperature == 0.0 or "seed" in a.parameters) and a.text_hash is not None
    ]
    equal = sum(a.text_hash == b.text_hash for a, b in fixed)
    return Equality(
        num_compared=len(fixed),
        num_equal=equal,
        share=share_interval(equal, len(fixed)) if fixed else None,
    )


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
    """Gains in time of every class; nothing by what all requests have alike.

    Where two keys tell the same requests apart, as a temperature for each category does, the first
    of them counts.
    """
    found, seen = [], []
    keys = {
        "category": lambda r: r.category,
        "temperature": temperature_key(records),
        "context": _context,
    }
    for by, key in keys.items():
        groups = _groups(records, key)
        apart = {frozenset((r.block, r.index) for r in own) for own in groups.values()}
        if apart in seen:
            continue
        seen.append(apart)
        every = [
            _times_of(by, value, compute_gains(own, data, ServiceLevels(), {}))
            for value, own in groups.items()
        ]
        found += [own for own in every if own.num_pairs >= FEWEST_REQUESTS]
    return tuple(found)


def alone_gains(category: str, alone: AbSummary) -> ClassGains:
    """A category's gains where it was the only traffic."""
    return _times_of("category", category, alone.gains)


def _times_of(by: str, value: str, gains: Sequence[ArmGain]) -> ClassGains:
    times = tuple(g for g in gains if g.metric.startswith(("tpot_", "ttft_", "e2e_")))
    num = times[0].num_pairs if times else 0
    return ClassGains(by=by, value=value, num_pairs=num, gains=times)


def _groups(
    records: Sequence[RequestRecord], key: Callable[[RequestRecord], str]
) -> dict[str, list[RequestRecord]]:
    """Records by class, in order of its name; empty where there is one class only."""
    groups: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in records:
        if record.ok and not record.warm_up:
            groups[key(record)].append(record)
    groups.pop("", None)
    return dict(sorted(groups.items(), key=lambda g: order_of(g[0]))) if len(groups) > 1 else {}


def order_of(value: str) -> tuple[float, str]:
    """Classes that are numbers in their order, before all others."""
    head = value.split("-")[0].split(" ")[0].strip("<>=")
    try:
        return float(head), value
    except ValueError:
        return float("inf"), value


def _context(record: RequestRecord) -> str:
    """The prompt's length between two edges; nothing where the server does not say."""
    if record.prompt_tokens is None:
        return ""
    for low, high in zip((0, *PROMPT_EDGES), PROMPT_EDGES, strict=False):
        if record.prompt_tokens <= high:
            return f"{low + 1}-{high} tokens"
    return f">{PROMPT_EDGES[-1]} tokens"
