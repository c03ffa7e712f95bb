"""Many A/Bs, each in its own folder: a grid of settings, or acceptance forced level by level.

A grid maps settings (dotted names, or `{placeholders}` of the arms' commands) to values, such as
temperatures, draft lengths, methods, loads and quantizations. Every cell is measured by itself:
nothing is read from gauges that a server has summed up since it started.

The dial is the break-even of a system, measured before there is a draft. vLLM and Foretoken
(`rejection_sample_method` synthetic) and llama.cpp (`--spec-synth-*`) can be told what share of
drafts to accept; elsewhere drafts of known agreement can stand in. At each load the gain over plain
decoding is measured at some levels; where it crosses 1 is the acceptance that a draft has to reach.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.errors import ConfigError, one_of
from foretoken.lab.analysis.gains import GAINS
from foretoken.lab.measure.ab import run_or_read
from foretoken.lab.measure.bench import Watch, silent
from foretoken.lab.measure.experiment import AbConfig, ArmConfig
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import AbSummary, AcceptanceBucket
from foretoken.lab.records.run_files import write_json
from foretoken.lab.stats.intervals import Floats, Interval, unknown
from foretoken.lab.stats.ratios import FEWEST_BLOCKS, block_weights

Values = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]
FEWEST_STEPS = 200
"""Verifications of a cell below which its acceptance is marked: a share of 0.5 is then known to
about a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of a grid."""

    values: Values
    summary: AbSummary

    def gain(self, metric: str) -> Interval:
        """A gain of the cell; unknown if it has none."""
        found = self.summary.gain(metric)
        return found.ratio if found is not None else unknown()

    @property
    def drafts(self) -> AcceptanceBucket | None:
        """The candidate's acceptance over all its requests."""
        return self.summary.arm(self.summary.candidate).all_drafts

    @property
    def acceptance(self) -> Interval:
        """Acceptance rate of the candidate in this cell."""
        return self.drafts.rate if self.drafts is not None else unknown()

    @property
    def p10(self) -> Interval:
        """P10 of requests' rates, the sampling noise taken out."""
        return self.drafts.p10 if self.drafts is not None else unknown()

    @property
    def num_steps(self) -> int:
        """Verifications; where the server does not say, one per five drafts."""
        found = self.drafts
        if found is None:
            return 0
        return found.num_drafted // 5 if found.num_steps is None else found.num_steps

    @property
    def enough(self) -> bool:
        """Whether there are steps enough for the acceptance to mean something."""
        return self.num_steps >= FEWEST_STEPS

    @property
    def dead(self) -> bool:
        """Whether an arm answered nothing."""
        return any(a.num_errors == a.num_requests for a in self.summary.arms)


def cells_of(grid: Grid) -> list[Values]:
    """Every combination, the last name turning fastest.

    Raises:
        ConfigError: a name has no values.
    """
    for name, values in grid.items():
        if not isinstance(values, Sequence) or isinstance(values, str) or not values:
            raise ConfigError(f"--grid {name}", values, f"a list of values, such as {name}=0,1")
    names = list(grid)
    rows = itertools.product(*(grid[name] for name in names))
    return [dict(zip(names, row, strict=True)) for row in rows]


def apply(config: AbConfig, values: Values) -> AbConfig:
    """The settings of a cell.

    Raises:
        ConfigError: a value has neither a setting nor a placeholder to go to.
    """
    plain: dict[str, Any] = to_plain(config)
    for name, value in values.items():
        if name == "temperature":
            plain["workload"]["temperatures"] = [value]
        elif "." in name:
            _set(plain, name, value)
        elif not _fill(plain, name, value):
            allowed = f"a setting such as load.rate, or {{{name}}} in the candidate's command"
            raise ConfigError(f"--grid {name}", value, allowed)
    return from_plain(AbConfig, plain, "settings")


def _set(plain: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not isinstance(plain.get(part), dict):
            groups = [key for key, own in plain.items() if isinstance(own, dict)]
            allowed = f"a setting; of {part!r} there is none: {one_of(part, groups)}"
            raise ConfigError(f"--grid {name}", value, allowed)
        plain = plain[part]
    plain[last] = value


def _fill(plain: dict[str, Any], name: str, value: Any) -> bool:
    """Put a value where `{name}` stands in either arm's command or body."""
    found = False
    text = value if isinstance(value, str) else json.dumps(value)
    for arm in ("baseline", "candidate"):
        command = plain[arm]["command"]
        if command is not None and f"{{{name}}}" in command:
            plain[arm]["command"] = command.replace(f"{{{name}}}", text)
            found = True
    return found


def folder_of(values: Values) -> str:
    """A folder's name for a cell."""
    words = "_".join(f"{name.split('.')[-1]}-{value}" for name, value in values.items())
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in words)[:120] or "cell"


def run_sweep(
    config: AbConfig, grid: Grid, out: Path, *, resume: bool = False, watch: Watch = silent
) -> list[Cell]:
    """Measure every cell; with `resume`, finished ones are read instead.

    Raises:
        ConfigError: the grid does not fit the settings. EndpointError: no server.
    """
    todo = [(values, apply(config, values)) for values in cells_of(grid)]
    cells = []
    for values, settings in todo:
        summary = run_or_read(settings, out / folder_of(values), resume=resume, watch=watch)
        cells.append(Cell(values=values, summary=summary))
        write_json(out / "sweep.json", {"kind": "sweep", "schema": 1,
                                        "cells": [describe(cell) for cell in cells]})  # fmt: skip
    return cells


def describe(cell: Cell) -> dict[str, Any]:
    """A cell as one row."""
    names = ("tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99", "e2e_mean", "tokens_per_s", "goodput")
    gains = {name: to_plain(cell.gain(name)) for name in names if cell.summary.gain(name)}
    arm = cell.summary.arm(cell.summary.candidate)
    return {
        "values": cell.values,
        "gains": gains,
        "num_steps": cell.num_steps,
        "enough_steps": cell.enough,
        "acceptance": [
            to_plain(asdict(b)) for b in (*arm.buckets("all"), *arm.buckets("temperature"))
        ],
    }


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
    if not plan.rates or not all(0 <= rate <= 1 for rate in plan.rates):
        allowed = "chances of a draft token from 0 to 1, such as 0,0.5,0.9"
        raise ConfigError("--rates", plan.rates, allowed)
    if plan.metric not in GAINS:
        raise ConfigError("--metric", plan.metric, one_of(plan.metric, GAINS))
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
    if command == (arm.command or ""):
        allowed = "a command with {rate}, {rates:K}, {length:K} or {percent}, which sets acceptance"
        raise ConfigError("--candidate", arm.command or arm.url, allowed)
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
    """Zero of a straight line through the points, from 0 (always pays) to infinity (never)."""
    slope, base = np.polyfit(rates, logs, 1)
    if slope <= 0:
        return 0.0 if logs.mean() > 0 else math.inf
    crossing = -base / slope
    return 0.0 if crossing < 0 else math.inf if crossing > 1 else float(crossing)
