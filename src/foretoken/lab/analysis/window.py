"""From scrapes of a running server to what a watcher should know. Pure.

Acceptance over a window, never since the start; its distance to the break-even; a drift alarm
(two-sided CUSUM, Page 1954); and the signal of a mixed workload: P50 better, P99 worse than the
baseline's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foretoken.lab.http.scraping import COUNTERS, PER_POSITION, grown
from foretoken.lab.records.results import Scrape

SLACK = 0.5
ALARM = 5.0
_TPOT = "vllm:request_time_per_output_token_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the watched server is held against."""

    break_even: float | None = None
    """r*, from `lab fit` or `lab dial`."""
    tpot_p50_s: float | None = None
    """Of the baseline."""
    tpot_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One moment of a watched server."""

    time_s: float
    rate: float
    """Accepted per drafted token of the window; NaN without drafts."""
    length: float
    by_position: tuple[float, ...]
    tokens_per_s: float
    running: float
    waiting: float
    kv_usage: float
    preemptions: float
    tpot_p50_s: float
    tpot_p99_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A rule that fired."""

    rule: str
    text: str


def blank_reading(time_s: float) -> Reading:
    """A moment at which the server told nothing."""
    names = ("rate", "length", "tokens_per_s", "running", "waiting", "kv_usage", "preemptions",
             "tpot_p50_s", "tpot_p99_s")  # fmt: skip
    return Reading(time_s=time_s, by_position=(), **dict.fromkeys(names, math.nan))


def read_window(
    before: Scrape, after: Scrape, buckets: tuple[Mapping[float, float], Mapping[float, float]]
) -> Reading:
    """What happened between two scrapes; `buckets` are TPOT's cumulative counts at each."""
    change = grown(before.values, after.values)
    seconds = max(after.time_s - before.time_s, 1e-9)
    drafts = change.get(COUNTERS[0], 0.0)
    drafted, accepted = change.get(COUNTERS[1], 0.0), change.get(COUNTERS[2], 0.0)
    positions = [n for n in change if n.startswith(PER_POSITION + "{")]
    ordered = sorted(positions, key=lambda n: int(n.split('"')[1]))
    window = {edge: buckets[1][edge] - buckets[0].get(edge, 0.0) for edge in buckets[1]}
    return Reading(
        time_s=after.time_s,
        rate=accepted / drafted if drafted else math.nan,
        length=1 + accepted / drafts if drafts else math.nan,
        by_position=tuple(change[n] / drafts for n in ordered) if drafts else (),
        tokens_per_s=change.get("vllm:generation_tokens", 0.0) / seconds,
        running=after.values.get("vllm:num_requests_running", math.nan),
        waiting=after.values.get("vllm:num_requests_waiting", math.nan),
        kv_usage=after.values.get("vllm:kv_cache_usage_perc", math.nan),
        preemptions=change.get("vllm:num_preemptions", 0.0),
        tpot_p50_s=bucket_quantile(window, 0.5),
        tpot_p99_s=bucket_quantile(window, 0.99),
    )


def parse_buckets(page: str, name: str = _TPOT) -> dict[float, float]:
    """Cumulative counts of a histogram by upper edge, summed over labels."""
    found: dict[float, float] = {}
    for line in page.splitlines():
        if not line.startswith(name + "_bucket{") or 'le="' not in line:
            continue
        edge = float(line.split('le="', 1)[1].split('"', 1)[0].replace("+Inf", "inf"))
        found[edge] = found.get(edge, 0.0) + float(line.rsplit(None, 1)[1])
    return found


def bucket_quantile(counts: Mapping[float, float], q: float) -> float:
    """Quantile of a histogram by linear interpolation inside its bucket; NaN if it is empty."""
    edges = sorted(counts)
    total = counts[edges[-1]] if edges else 0.0
    if total <= 0:
        return math.nan
    low, below = 0.0, 0.0
    for edge in edges:
        if counts[edge] >= q * total:
            if math.isinf(edge) or counts[edge] == below:
                return low
            return low + (edge - low) * (q * total - below) / (counts[edge] - below)
        low, below = edge, counts[edge]
    return low


def find_alarms(readings: Sequence[Reading], targets: Targets) -> list[Alarm]:
    """Every rule that fires on the newest reading, given those before it."""
    if not readings:
        return []
    last, found = readings[-1], []
    if targets.break_even is not None and last.rate < targets.break_even:
        text = f"acceptance {last.rate:.2f} is below its break-even {targets.break_even:.2f}"
        found.append(Alarm(rule="break_even", text=text))
    drift = drifting([r.rate for r in readings if not math.isnan(r.rate)])
    if drift:
        found.append(Alarm(rule="drift", text=f"acceptance has {drift} since the start"))
    if _mixed(last, targets):
        text = "TPOT: P50 is better than the baseline's, P99 is worse: a mixed workload"
        found.append(Alarm(rule="mixed_workload", text=text))
    if last.kv_usage > 0.95 and last.preemptions > 0:
        text = f"KV cache {last.kv_usage:.0%} full, {last.preemptions:.0f} preemptions"
        found.append(Alarm(rule="kv_squeeze", text=text))
    return found


def _mixed(last: Reading, targets: Targets) -> bool:
    if targets.tpot_p50_s is None or targets.tpot_p99_s is None:
        return False
    return last.tpot_p50_s < targets.tpot_p50_s and last.tpot_p99_s > targets.tpot_p99_s


def drifting(rates: Sequence[float], *, reference: int = 10) -> str:
    """fallen, risen or nothing: a CUSUM against the first `reference` windows."""
    if len(rates) <= reference:
        return ""
    start = rates[:reference]
    mean = sum(start) / reference
    spread = math.sqrt(sum((r - mean) ** 2 for r in start) / (reference - 1))
    spread = max(spread, 0.01)
    up = down = 0.0
    for rate in rates[reference:]:
        step = (rate - mean) / spread
        up, down = max(0.0, up + step - SLACK), max(0.0, down - step - SLACK)
    return "risen" if up > ALARM else "fallen" if down > ALARM else ""
