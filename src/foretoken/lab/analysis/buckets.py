"""Acceptance of a run by temperature, class and length of output, noise taken out.

Requests are the clusters: within one, steps depend on each other. Buckets come with how many
requests had too few steps to say anything about their own rate.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from foretoken.lab.records.results import Acceptance, AcceptanceBucket, RequestRecord
from foretoken.lab.stats.intervals import Floats, Interval, unknown
from foretoken.lab.stats.ratios import Sample, clustered_interval
from foretoken.lab.stats.shrinkage import request_quantiles
from foretoken.metrics import TEMPERATURE_EDGES, temperature_bucket

FEWEST_STEPS = 3
_LENGTHS = (20, 50, 100, 200, 500, 1000)

Key = Callable[[RequestRecord], str]


def summarize_acceptance(records: Sequence[RequestRecord]) -> tuple[AcceptanceBucket, ...]:
    """Buckets of all requests with drafts, by everything that can be told apart."""
    found: list[AcceptanceBucket] = []
    keys = {"all": lambda _: "all", "temperature": _temperature_key(records), **_KEYS}
    for by, key in keys.items():
        groups: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in records:
            if record.acceptance is not None and record.acceptance.num_drafted > 0:
                groups[key(record)].append(record)
        if by == "category" and set(groups) == {""}:
            continue
        found += [_bucket(by, value, groups[value]) for value in sorted(groups, key=_order)]
    return tuple(found)


def _order(value: str) -> tuple[float, str]:
    head = value.split("-")[0].removeprefix("<=").removeprefix(">")
    return (float(head), value) if head.replace(".", "", 1).isdigit() else (-1.0, value)


def _length_key(record: RequestRecord) -> str:
    tokens = record.output_tokens or 0
    for low, high in zip((0, *_LENGTHS), _LENGTHS, strict=False):
        if tokens <= high:
            return f"{low + 1}-{high}"
    return f">{_LENGTHS[-1]}"


def _temperature_key(records: Sequence[RequestRecord]) -> Key:
    """Each temperature by itself if there are few, as in a sweep; else the server's buckets."""
    several = len({record.temperature for record in records}) > len(TEMPERATURE_EDGES) + 1

    def key(record: RequestRecord) -> str:
        if record.temperature is None:
            return "default"
        if not several:
            return f"{record.temperature:g}"
        edge = temperature_bucket(record.temperature)
        return f">{TEMPERATURE_EDGES[-1]:g}" if edge == "inf" else f"<={edge}"

    return key


_KEYS: dict[str, Key] = {
    "category": lambda record: record.category,
    "output_tokens": _length_key,
}


def _bucket(by: str, value: str, records: Sequence[RequestRecord]) -> AcceptanceBucket:
    found = [r.acceptance for r in records if r.acceptance is not None]
    drafted = np.array([a.num_drafted for a in found], np.float64)
    accepted = np.array([a.num_accepted for a in found], np.float64)
    long_enough = [a for a in found if _steps(a) >= FEWEST_STEPS]
    rates = np.array([a.rate for a in long_enough])
    steps = np.array([_steps(a) for a in long_enough], np.float64)
    within = np.array([_variance(a) for a in long_enough], np.float64)
    p10, p50, p90 = (
        request_quantiles(rates, steps, within, (0.1, 0.5, 0.9))
        if rates.size
        else (unknown(), unknown(), unknown())
    )
    known_steps = [a.num_steps for a in found if a.num_steps is not None]
    return AcceptanceBucket(
        by=by,
        value=value,
        num_requests=len(found),
        num_drafted=int(drafted.sum()),
        num_accepted=int(accepted.sum()),
        num_steps=sum(known_steps) if len(known_steps) == len(found) else None,
        rate=_ratio(accepted, drafted),
        length=_length(found),
        p10=p10,
        p50=p50,
        p90=p90,
        raw_p10=float(np.quantile(rates, 0.1)) if rates.size else float("nan"),
        num_too_short=len(found) - len(long_enough),
        histogram=_pool(found),
        exact=all(a.exact for a in found),
    )


def _ratio(top: Floats, bottom: Floats) -> Interval:
    """Ratio of sums with requests drawn again: the mean of top weighted by bottom."""
    point = float(top.sum() / bottom.sum())
    clusters = np.arange(top.size)

    def ratio(values: Floats, weights: Floats) -> Floats:
        sums: Floats = (weights @ values) / (weights @ bottom)
        return sums

    if top.size < 3 or point <= 0:
        return unknown(point)
    return clustered_interval(Sample(top, clusters), ratio)


def _length(found: Sequence[Acceptance]) -> Interval | None:
    if any(not a.num_steps for a in found):
        return None
    tokens = np.array([a.num_accepted + (a.num_steps or 0) for a in found], np.float64)
    steps = np.array([a.num_steps for a in found], np.float64)
    return _ratio(tokens, steps)


def _steps(found: Acceptance) -> float:
    """Steps of a request; where the server does not say, one per five drafts."""
    return float(found.num_steps if found.num_steps is not None else found.num_drafted / 5)


def _variance(found: Acceptance) -> float:
    """Of one step's rate around its request's, from steps, else from the histogram."""
    if found.per_step_accepted and len(found.per_step_drafted) == len(found.per_step_accepted):
        drafted = np.maximum(np.array(found.per_step_drafted, np.float64), 1.0)
        rates = np.array(found.per_step_accepted) / drafted
    elif found.histogram and found.num_steps:
        k = found.num_drafted / found.num_steps
        rates = np.repeat(np.arange(len(found.histogram)) / k, found.histogram)
    else:
        rate = found.rate
        return max(rate * (1 - rate), 1e-6)
    return float(rates.var(ddof=1)) if rates.size > 1 else float("nan")


def _pool(found: Sequence[Acceptance]) -> tuple[int, ...]:
    longest = max((len(a.histogram) for a in found), default=0)
    return tuple(sum(a.histogram[j] for a in found if len(a.histogram) > j) for j in range(longest))
