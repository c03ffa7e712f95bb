"""Acceptance forced level by level: the break-even of a system, measured before there is a draft.

vLLM and Foretoken (`rejection_sample_method` synthetic) and llama.cpp (`--spec-synth-*`) can be
told what share of drafts to accept; elsewhere drafts of known agreement can stand in. At each load
the gain over plain decoding is measured at some levels; where it crosses 1 is the acceptance that a
draft would have to reach.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.errors import ConfigError
from foretoken.lab.measure.ab import run_or_read
from foretoken.lab.measure.bench import Watch, silent
from foretoken.lab.measure.experiment import AbConfig, ArmConfig
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.files import write_json
from foretoken.lab.records.results import AbSummary
from foretoken.lab.stats.intervals import Floats, Interval, unknown
from foretoken.lab.stats.ratios import FEWEST_BLOCKS, block_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """The acceptance a system needs at one load."""

    load: str
    metric: str
    rate: Interval
    """Draft acceptance rate at which the gain is 1; 0: it always pays, infinite: never."""
    points: tuple[tuple[float, Interval], ...]
    """(Rate, gain) as measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialPlan:
    """What is forced, and under which loads."""

    rates: tuple[float, ...] = (0.0, 0.3, 0.6, 0.9)
    """Chances of each draft token."""
    loads: tuple[Mapping[str, Any], ...] = ({"kind": "closed", "concurrency": 1},)
    metric: str = "tpot_mean"


def dial_config(config: AbConfig) -> AbConfig:
    """With forced acceptance texts are garbage, so lengths are fixed."""
    workload = config.workload
    parameters = {"ignore_eos": True, **workload.parameters}
    return replace(config, workload=replace(workload, parameters=parameters))


def run_dial(
    config: AbConfig,
    plan: "DialPlan",
    out: Path,
    *,
    resume: bool = False,
    watch: Watch = silent,
) -> list[BreakEven]:
    """Break-even acceptance at every load; `{rate}` or `{rates}` in the candidate's command.

    Raises:
        ConfigError: the candidate has nothing to turn.
    """
    found = []
    for number, levels in enumerate(levels_of(config, plan)):
        points = [
            (rate, run_or_read(settings, out / f"load-{number}_rate-{rate:g}",
                               resume=resume, watch=watch))
            for rate, settings in levels
        ]  # fmt: skip
        found.append(find_break_even(str(levels[0][1].load), points, plan.metric))
        write_json(out / "dial.json", {"kind": "dial", "schema": 1, "break_even": found})
    return found


def levels_of(config: AbConfig, plan: "DialPlan") -> list[list[tuple[float, AbConfig]]]:
    """Every level with its A/B, per load.

    Raises:
        ConfigError: the candidate has nothing to turn, or there is no level.
    """
    if not plan.rates:
        raise ConfigError("rates", plan.rates, "chances of a draft token")
    found = []
    for load in plan.loads:
        own = from_plain(AbConfig, {**to_plain(dial_config(config)), "load": dict(load)}, "dial")
        found.append(
            [(rate, replace(own, candidate=turned(own.candidate, rate))) for rate in plan.rates]
        )
    return found


def turned(arm: ArmConfig, rate: float) -> ArmConfig:
    """The arm with its acceptance set.

    `{rate}` becomes the chance of each draft token; `{rates:K}` a list of K unconditional
    per-position rates of it, as vLLM and Foretoken take them; `{length:K}` the acceptance length;
    `{percent}` the chance in whole percent, as part of a draft's name.
    """
    command = arm.command or ""
    for k in range(1, 33):
        powers = [round(rate**i, 6) for i in range(1, k + 1)]
        command = command.replace(f"{{rates:{k}}}", json.dumps(powers))
        command = command.replace(f"{{length:{k}}}", f"{1 + sum(powers):.6g}")
    command = command.replace("{rate}", f"{rate:g}").replace("{percent}", f"{100 * rate:.0f}")
    if command == arm.command:
        raise ConfigError(
            "candidate.command",
            arm.command,
            "a command with {rate}, {rates:K}, {length:K} or {percent}",
        )
    return replace(arm, command=command)


def find_break_even(
    load: str, points: Sequence[tuple[float, AbSummary]], metric: str, *, resamples: int = 1000
) -> BreakEven:
    """Where the line of log gain over measured acceptance rate is 0; blocks are drawn again."""
    measured: list[float] = []
    logs: list[Floats] = []
    pairs: list[tuple[float, Interval]] = []
    for rate, summary in points:
        gain = summary.gain(metric)
        if gain is None or not gain.ratio_by_block:
            continue
        found = summary.arm(summary.candidate).all_drafts
        own = found.rate.estimate if found is not None else rate
        measured.append(own)
        pairs.append((own, gain.ratio))
        logs.append(np.log(np.asarray(gain.ratio_by_block)))
    rate_interval = _crossing(np.asarray(measured), logs, resamples)
    return BreakEven(load=load, metric=metric, rate=rate_interval, points=tuple(pairs))


def _crossing(rates: Floats, logs: Sequence[Floats], resamples: int) -> Interval:
    if len(rates) < 2 or np.ptp(rates) == 0:
        return unknown()
    point = _zero(rates, np.array([v.mean() for v in logs]))
    if min(v.size for v in logs) < FEWEST_BLOCKS:
        return unknown(point)
    drawn = []
    weights = [block_weights(v.size, resamples, seed) for seed, v in enumerate(logs)]
    for r in range(resamples):
        means = [float((w[r] * v).sum() / w[r].sum()) for w, v in zip(weights, logs, strict=True)]
        drawn.append(_zero(rates, np.array(means)))
    low, high = np.sort(drawn)[[int(0.025 * resamples), int(0.975 * resamples)]]
    return Interval(point, min(point, float(low)), max(point, float(high)))


def _zero(rates: Floats, logs: Floats) -> float:
    """Of a straight line through the points, between 0 (always pays) and infinity (never)."""
    slope, base = np.polyfit(rates, logs, 1)
    if slope <= 0:
        return 0.0 if logs.mean() > 0 else math.inf
    crossing = -base / slope
    return 0.0 if crossing < 0 else math.inf if crossing > 1 else float(crossing)
