"""Watches a running server: scrapes it, keeps a window of readings, writes one HTML page.

A reading has acceptance over the window, never since the start. Rules fire on: acceptance below its
break-even, or where that is not known an acceptance length that no cost of drafting can make worth
it; a server that drafts nothing; drift (two-sided CUSUM, Page 1954); the signal of a mixed
workload, P50 better and P99 worse than the baseline's; squeezed memory. The page is a file that
reloads itself; what is drawn on a terminal is the caller's business.
"""

import asyncio
import html
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.scraping import (
    COUNTERS,
    PER_POSITION,
    fetch_metrics,
    grown,
    parse_buckets,
    parse_metrics,
)
from foretoken.lab.http.timed import HttpPool, now
from foretoken.lab.records.results import Scrape

SLACK = 0.5
ALARM = 5.0
FEWEST_DRAFTED = 200
"""Drafted tokens before their acceptance is judged; windows are put together until there are."""
WORTH_IT = 1.3
"""A speed-up is at most the acceptance length; one below this is not worth its trouble."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the watched server is held against."""

    break_even: float | None = None
    """r*, from an A/B, `lab fit` or `lab dial`; None: it is not known."""
    tpot_p50_s: float | None = None
    """Median time per output token of the baseline."""
    tpot_p99_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One moment of a watched server."""

    time_s: float
    rate: float
    """Accepted per drafted token of the window; NaN without drafts."""
    length: float
    num_drafts: float
    """Verifications with a draft in the window."""
    num_drafted: float
    num_accepted: float
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
    counts = dict.fromkeys(("num_drafts", "num_drafted", "num_accepted"), 0.0)
    names = ("rate", "length", "tokens_per_s", "running", "waiting", "kv_usage", "preemptions",
             "tpot_p50_s", "tpot_p99_s")  # fmt: skip
    unknown = dict.fromkeys(names, math.nan)
    return Reading(time_s=time_s, by_position=(), **counts, **unknown)


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
        num_drafts=drafts,
        num_drafted=drafted,
        num_accepted=accepted,
        by_position=tuple(change[n] / drafts for n in ordered) if drafts else (),
        tokens_per_s=change.get("vllm:generation_tokens", 0.0) / seconds,
        running=after.values.get("vllm:num_requests_running", math.nan),
        waiting=after.values.get("vllm:num_requests_waiting", math.nan),
        kv_usage=after.values.get("vllm:kv_cache_usage_perc", math.nan),
        preemptions=change.get("vllm:num_preemptions", 0.0),
        tpot_p50_s=bucket_quantile(window, 0.5),
        tpot_p99_s=bucket_quantile(window, 0.99),
    )


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
    found += _pays(readings, targets)
    found += _drafts_at_all(readings)
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


def _pays(readings: Sequence[Reading], targets: Targets) -> list[Alarm]:
    """Acceptance of the newest windows that have drafts enough to tell."""
    drafts = drafted = accepted = 0.0
    for reading in reversed(readings):
        drafts, drafted = drafts + reading.num_drafts, drafted + reading.num_drafted
        accepted += reading.num_accepted
        if drafted >= FEWEST_DRAFTED:
            break
    else:
        return []
    rate, seen = accepted / drafted, f"over {drafted:,.0f} drafted tokens"
    if targets.break_even is not None:
        if rate >= targets.break_even:
            return []
        text = f"acceptance {rate:.2f} {seen} is below its break-even {targets.break_even:.2f}"
        return [Alarm(rule="break_even", text=text)]
    length = 1 + accepted / drafts if drafts else math.nan
    if not length < WORTH_IT:
        return []
    text = (
        f"acceptance {rate:.2f} {seen} is {length:.2f} tokens per verification: at most "
        f"{length:.2f}x even if drafts cost nothing; leave speculation off, or draft otherwise"
    )
    return [Alarm(rule="acceptance_length", text=text)]


def _drafts_at_all(readings: Sequence[Reading]) -> list[Alarm]:
    """A server that writes and has drafted nothing since it is watched."""
    if any(reading.num_drafted for reading in readings):
        return []
    times = [0.0, *(reading.time_s for reading in readings)]
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    written = sum(
        reading.tokens_per_s * s
        for reading, s in zip(readings, seconds, strict=True)
        if not math.isnan(reading.tokens_per_s)
    )
    if written < FEWEST_DRAFTED:
        return []
    text = f"{written:,.0f} tokens were written and none was drafted: is speculation on?"
    return [Alarm(rule="no_drafts", text=text)]


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


Shown = Callable[[list[Reading], list[Alarm]], None]
_KEEP = 720


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchConfig:
    """What is watched, and how."""

    url: str
    every_s: float = 5.0
    targets: Targets = Targets()
    page: Path | None = None
    ticks: int | None = None
    """Stop after so many readings; None: never."""


async def watch(config: WatchConfig, show: Shown) -> list[Alarm]:
    """Read until told to stop; returns every rule that fired, once.

    Raises:
        EndpointError: the server has no metrics at the start.
        ConfigError: the page cannot be written.
    """
    pool = HttpPool(config.url)
    try:
        return await _follow(config, pool, show)
    finally:
        await pool.close()


async def _follow(config: WatchConfig, pool: HttpPool, show: Shown) -> list[Alarm]:
    readings: deque[Reading] = deque(maxlen=_KEEP)
    fired: dict[str, Alarm] = {}
    start = now()
    text = await fetch_metrics(pool)
    if text is None:
        why = "no metrics to watch: start the server first (llama.cpp with --metrics)"
        raise EndpointError(f"{config.url}/metrics: {why}, or give another URL")
    before, buckets = Scrape(time_s=0.0, values=parse_metrics(text)), parse_buckets(text)
    ticks = 0
    while config.ticks is None or ticks < config.ticks:
        await asyncio.sleep(config.every_s)
        ticks += 1
        text, at = await fetch_metrics(pool), now() - start
        if text is None:
            # The window grows until the server answers again.
            readings.append(blank_reading(at))
            silent = f"no metrics since {at - before.time_s:.0f} s"
            alarms = [Alarm(rule="unreachable", text=silent)]
        else:
            after, later = Scrape(time_s=at, values=parse_metrics(text)), parse_buckets(text)
            readings.append(read_window(before, after, (buckets, later)))
            before, buckets = after, later
            alarms = find_alarms(list(readings), config.targets)
        if config.page is not None:
            earlier = [a for r, a in fired.items() if r not in {alarm.rule for alarm in alarms}]
            page = render_page(config, list(readings), alarms, earlier)
            alarms += _write_page(config.page, page, first=ticks == 1)
        fired.update({alarm.rule: alarm for alarm in alarms})
        show(list(readings), alarms)
    return list(fired.values())


def _write_page(page: Path, text: str, *, first: bool) -> list[Alarm]:
    """Replace the page whole; once it was there, what the disk says against it is an alarm.

    Raises:
        ConfigError: it cannot be written the first time.
    """
    temporary = page.with_name(page.name + ".partial")
    try:
        temporary.write_text(text, "utf-8")
        temporary.replace(page)
    except OSError as error:
        if first:
            raise ConfigError("--html", str(page), f"a file to write to ({error})") from error
        return [Alarm(rule="page", text=f"the page is not up to date: {error}")]
    return []


UNKNOWN = "-"


def describe(reading: Reading) -> dict[str, str]:
    """A reading in words; what the server does not tell, or nothing happened to tell, is `-`."""

    def show(form: str, *values: float) -> str:
        return " / ".join(UNKNOWN if math.isnan(v) else form.format(v) for v in values)

    return {
        "acceptance rate": show("{:.2f}", reading.rate),
        "acceptance length": show("{:.2f}", reading.length),
        "tokens/s": show("{:.1f}", reading.tokens_per_s),
        "running / waiting": show("{:.0f}", reading.running, reading.waiting),
        "KV cache": show("{:.0%}", reading.kv_usage),
        "TPOT P50 / P99, ms": show("{:.1f}", 1000 * reading.tpot_p50_s, 1000 * reading.tpot_p99_s),
    }


def sparkline(values: list[float], *, mark: float | None = None) -> str:
    """An SVG line over time from 0 up, broken where nothing is known; dashed at `mark`."""
    known = [v for v in values if not math.isnan(v)]
    top = max([*known, mark or 0.0, 1e-9]) * 1.1
    unbroken: list[list[str]] = [[]]
    for i, v in enumerate(values):
        if math.isnan(v):
            unbroken.append([])
        else:
            x = 600 * i / max(len(values) - 1, 1)
            unbroken[-1].append(f"{x:.1f},{100 - 100 * v / top:.1f}")
    level = "" if mark is None else (
        f'<line x1="0" x2="600" y1="{100 - 100 * mark / top:.1f}" y2="{100 - 100 * mark / top:.1f}"'
        ' stroke="#c0392b" stroke-dasharray="6 4"/>'
    )  # fmt: skip
    lines = "".join(
        f'<polyline fill="none" stroke="#2c6fbb" stroke-width="2" points="{" ".join(own)}"/>'
        for own in unbroken
        if own
    )
    return (
        f'<svg viewBox="0 0 600 100" preserveAspectRatio="none">{level}{lines}</svg>'
        f"<p>the frame is {top:.3g} high</p>"
    )


_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#222;background:#fafafa}svg{width:100%;height:110px;background:#fff;border:1px solid #ddd}
p{margin:0;color:#777;font-size:.8rem}
h2{font-size:1rem;margin:1.2rem 0 .3rem}.alarm{background:#fdecea;border-left:4px solid #c0392b;
padding:.5rem .8rem;margin:.4rem 0}.quiet{background:#eaf6ec;border-left:4px solid #2e8b57;
padding:.5rem .8rem}.before{color:#777;padding:.2rem .8rem}td{padding:.1rem 1.2rem .1rem 0}
@media (prefers-color-scheme:dark){body{color:#e6ebf2;background:#10151c}svg{background:#18202b;
border-color:#2c3644}.alarm{background:#3a1a1a}.quiet{background:#14301f}}"""


def render_page(
    config: WatchConfig, readings: list[Reading], alarms: list[Alarm], earlier: Sequence[Alarm] = ()
) -> str:
    """The HTML page, with what fires and what has fired; everything in it is escaped."""
    last = readings[-1]
    boxes = [
        f'<div class="alarm"><b>{html.escape(a.rule)}</b> {html.escape(a.text)}</div>'
        for a in alarms
    ] or ['<div class="quiet">no rule fires now</div>']
    boxes += [
        f'<div class="before">fired earlier: <b>{html.escape(a.rule)}</b> {html.escape(a.text)}'
        "</div>"
        for a in earlier
    ]
    rows = {
        **describe(last),
        "accepted by position": " ".join(map("{:.0%}".format, last.by_position)),
    }
    table = "".join(
        f"<tr><td>{n}</td><td>{html.escape(v or UNKNOWN)}</td></tr>" for n, v in rows.items()
    )
    rate = sparkline([r.rate for r in readings], mark=config.targets.break_even)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta http-equiv="refresh" content="{max(1, round(config.every_s))}">'
        f"<title>{html.escape(config.url)}</title><style>{_STYLE}</style>"
        f"<h1>{html.escape(config.url)}</h1>{''.join(boxes)}"
        f"<h2>draft acceptance rate (dashed: break-even)</h2>{rate}"
        f"<h2>tokens/s</h2>{sparkline([r.tokens_per_s for r in readings])}"
        f"<h2>now</h2><table>{table}</table></html>\n"
    )
