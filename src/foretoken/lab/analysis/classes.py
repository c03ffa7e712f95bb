"""How each class of requests fared inside an A/B: gains over the requests of one class alone.

A class is a category, a temperature or a length of prompt, where the traffic has several. The
requests of a class ran among all others, so what is found is its gain in this mix. Pure.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

from foretoken.lab.analysis.gains import compute_gains
from foretoken.lab.analysis.summary import ArmData, temperature_key
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import AbSummary, ClassGains, RequestRecord

PROMPT_EDGES = (256, 1024, 4096, 8192, 16384, 32768, 65536)
"""Tokens of a prompt at which a longer context begins."""
FEWEST_REQUESTS = 8
"""Requests of a class, per arm, below which nothing is said about it."""
_TIMES = ("tpot_", "ttft_", "e2e_")


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
        for value, own in groups.items():
            gains = compute_gains(own, data, ServiceLevels(), {})
            times = tuple(g for g in gains if g.metric.startswith(_TIMES))
            if times and times[0].num_pairs >= FEWEST_REQUESTS:
                num = times[0].num_pairs
                found.append(ClassGains(by=by, value=value, num_pairs=num, gains=times))
    return tuple(found)


def alone_gains(category: str, alone: AbSummary) -> ClassGains:
    """A category's gains where it was the only traffic."""
    times = tuple(g for g in alone.gains if g.metric.startswith(_TIMES))
    num = times[0].num_pairs if times else 0
    return ClassGains(by="category", value=category, num_pairs=num, gains=times)


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
