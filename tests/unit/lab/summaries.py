"""A/B summaries with chosen numbers, for the tests of decisions and reports."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.lab.records.results import (
    AbSummary,
    AcceptanceBucket,
    ArmGain,
    ArmSummary,
    ClassGains,
    Equality,
    Quantiles,
    RequestRecord,
    ServerInfo,
)
from foretoken.lab.records.run_files import LineWriter, write_json
from foretoken.lab.stats.intervals import Interval, student_quantile

METRICS = (
    "tpot_p50", "tpot_p95", "tpot_p99", "ttft_p50", "ttft_p95", "ttft_p99", "e2e_p50",
    "tokens_per_s",
)  # fmt: skip


def around(value: float, relative: float = 0.03) -> Interval:
    """An interval of +-`relative`."""
    return Interval(value, value / (1 + relative), value * (1 + relative))


def gain(metric: str, ratio: float, *, error: float = 0.01, blocks: int = 12) -> ArmGain:
    """A gain whose logarithm has this standard error."""
    half = error * student_quantile(0.975, blocks - 1)
    return ArmGain(
        metric=metric,
        ratio=Interval(ratio, ratio * math.exp(-half), ratio * math.exp(half)),
        num_blocks=blocks,
        num_pairs=30 * blocks,
        enough=True,
        ratio_by_block=tuple(
            ratio * math.exp(error * math.sqrt(blocks) * math.sin(7.0 * n)) for n in range(blocks)
        ),
    )


def class_gains(
    value: str, ratio: float, *, tail: float | None = None, by: str = "category", pairs: int = 1200
) -> ClassGains:
    """A class that gains `ratio`, and `tail` at P95 and P99 if there are requests enough."""
    gains = [gain("tpot_p50", ratio), gain("ttft_p50", 1.0)]
    for name, needed in (("tpot_p95", 200), ("tpot_p99", 1000)):
        own = gain(name, ratio if tail is None else tail)
        gains.append(replace(own, enough=pairs >= needed))
    sized = tuple(replace(own, num_pairs=pairs) for own in gains)
    return ClassGains(by=by, value=value, num_pairs=pairs, gains=sized)


def bucket(by: str = "all", value: str = "", rate: float = 0.5, **more: Any) -> AcceptanceBucket:
    """Acceptance at k = 5 around `rate`."""
    own: dict[str, Any] = {
        "by": by,
        "value": value,
        "num_requests": 200,
        "num_drafted": 50_000,
        "num_accepted": round(50_000 * rate),
        "num_steps": 10_000,
        "rate": around(rate, 0.04),
        "length": around(1 + 5 * rate),
        "p10": around(rate * 0.8, 0.05),
        "p90": around(min(1.0, rate * 1.2)),
        "raw_p10": rate * 0.7,
        "histogram": (4000, 1500, 1000, 1000, 1000, 1500),
    }
    return AcceptanceBucket(**{**own, **more})


def arm(name: str, *, tpot_s: float = 0.02, **more: Any) -> ArmSummary:
    """An arm of 200 requests without errors."""

    def quantiles(middle: float) -> Quantiles:
        return Quantiles(
            mean=around(middle), p50=around(middle), p95=around(2 * middle), p99=around(3 * middle)
        )

    own: dict[str, Any] = {
        "arm": name,
        "server": ServerInfo(url="http://127.0.0.1:8000", engine="vllm", version="0.33.0"),
        "num_requests": 200,
        "num_errors": 0,
        "errors": {},
        "duration_s": 600.0,
        "output_tokens": 200 * 128,
        "tokens_per_s": around(1 / tpot_s),
        "requests_per_s": 2.0,
        "goodput_per_s": None,
        "attained": None,
        "ttft": quantiles(0.1),
        "tpot": quantiles(tpot_s),
        "e2e": quantiles(128 * tpot_s),
        "counters": {"vllm:num_preemptions": 0.0},
        "gauges": {"vllm:kv_cache_usage_perc": 0.6},
    }
    return ArmSummary(**{**own, **more})


def ab(speedup: float = 1.6, *, error: float = 0.01, blocks: int = 12, **more: Any) -> AbSummary:
    """An A/B in which everything holds, and TPOT gains `speedup`."""
    gains = {name: gain(name, speedup, error=error, blocks=blocks) for name in METRICS}
    for name in ("ttft_p50", "ttft_p95", "ttft_p99"):
        gains[name] = gain(name, 1.0, error=error, blocks=blocks)
    candidate = arm(
        "on",
        tpot_s=0.02 / speedup,
        acceptance=(bucket(), bucket("temperature", "0"), bucket("temperature", "0.8", 0.45)),
        counters={"vllm:num_preemptions": 0.0, "vllm:spec_decode_num_draft_tokens": 50_000.0},
    )
    own: dict[str, Any] = {
        "baseline": "off",
        "candidate": "on",
        "arms": (arm("off"), candidate),
        "gains": tuple(gains.values()),
        "environment": {"host_busy": 0.02},
        "equality": Equality(num_compared=200, num_equal=200, share=Interval(1.0, 0.98, 1.0)),
    }
    return AbSummary(**{**own, **more})


def with_gain(summary: AbSummary, found: ArmGain) -> AbSummary:
    """The summary with one gain replaced."""
    rest = tuple(g for g in summary.gains if g.metric != found.metric)
    return replace(summary, gains=(*rest, found))


def with_candidate(summary: AbSummary, **changes: Any) -> AbSummary:
    """The summary with fields of the candidate replaced."""
    arms = tuple(replace(a, **changes) if a.arm == summary.candidate else a for a in summary.arms)
    return replace(summary, arms=arms)


def requests_of(summary: AbSummary, blocks: int = 3, per_block: int = 30) -> list[RequestRecord]:
    """Requests whose times follow the arms' numbers, with some spread."""
    rng = np.random.default_rng(0)
    found = []
    for block in range(blocks):
        for own in summary.arms:
            tpot = own.tpot.p50.estimate if own.tpot else 0.02
            for index in range(per_block):
                due = 0.4 * index
                first = due + 0.08 * float(rng.lognormal(0, 0.4))
                last = first + 127 * tpot * float(rng.lognormal(0, 0.15))
                chunks = np.linspace(first, last, 33)
                found.append(
                    RequestRecord(
                        index=block * per_block + index,
                        arm=own.arm,
                        block=block,
                        temperature=0.0,
                        scheduled_s=due,
                        sent_s=due,
                        first_s=first,
                        last_s=last,
                        end_s=last,
                        chunk_s=tuple(map(float, chunks)),
                        output_tokens=128,
                    )
                )
    return found


def write_run(folder: Path, summary: AbSummary) -> Path:
    """A run's folder with all of its files."""
    write_json(folder / "summary.json", summary)
    with LineWriter(folder / "requests.jsonl") as writer:
        for record in requests_of(summary):
            writer.write(record)
    return folder
