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
from foretoken.lab.analysis.summary import enough_drafts, num_verifications
from foretoken.lab.measure.ab import run_or_read
from foretoken.lab.measure.bench import Watch, silent
from foretoken.lab.measure.experiment import AbConfig, ArmConfig
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import AbSummary, AcceptanceBucket
from foretoken.lab.records.run_files import DIAL, SWEEP, write_json
from foretoken.lab.stats.intervals import Floats, Interval, unknown
from foretoken.lab.stats.lines import quotient
from foretoken.lab.stats.ratios import FEWEST_BLOCKS

Values = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]


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
        """Verifications of the candidate."""
        return num_verifications(self.summary.arm(self.summary.candidate))

    @property
    def enough(self) -> bool:
        """Whether there are steps enough for the acceptance to mean something."""
        return enough_drafts(self.summary.arm(self.summary.candidate))

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


SHORT = {
    "temperature": "workload.temperatures",
    "max_tokens": "workload.max_tokens",
    "class": "workload.category",
    "concurrency": "load.concurrency",
    "rate": "load.rate",
}
"""Names of a grid that need no dots, and the settings they stand for."""


def apply(config: AbConfig, values: Values) -> AbConfig:
    """The settings of a cell.

    Raises:
        ConfigError: a value has neither a setting nor a placeholder to go to.
    """
    plain: dict[str, Any] = to_plain(config)
    for name, value in values.items():
        if _fill(plain, name, value):
            continue
        if name not in SHORT and "." not in name:
            raise ConfigError(f"--grid {name}", value, _what_to_type(name, value))
        _set(plain, SHORT.get(name, name), [value] if name == "temperature" else value)
        _agree(plain["load"], name)
    return from_plain(AbConfig, plain, "settings")


def _agree(load: dict[str, Any], name: str) -> None:
    """Requests in flight mean a closed loop, and a rate an open one."""
    if name == "concurrency":
        load["kind"] = "closed"
    elif name == "rate" and load["kind"] not in ("constant", "poisson", "gamma"):
        load["kind"] = "poisson"


def _what_to_type(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')} {{{name}}}"
    known = [key for key in SHORT if key != name]
    return (
        f"{{{name}}} in the candidate's command, such as --candidate '... {flag}' with --grid "
        f"{name}={value}; without braces {one_of(name, known)}, or a setting with dots such as "
        "load.burstiness"
    )


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
        write_json(out / SWEEP, {"kind": "sweep", "schema": 1,
                                 "cells": [describe(cell) for cell in cells]})  # fmt: skip
    return cells


def describe(cell: Cell) -> dict[str, Any]:
    """A cell as one row."""
    names = ("tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99", "e2e_mean", "tokens_per_s", "goodput")
    gains = {name: to_plain(cell.gain(name)) for name in names if cell.summary.gain(name)}
    arm = cell.summary.arm(cell.summary.candidate)
    return {
        "values": cell.values,
        "folder": folder_of(cell.values),
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
        write_json(out / DIAL, {"kind": "dial", "schema": 1, "break_even": found})
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


def find_break_even(load: str, points: Sequence[tuple[float, AbSummary]], metric: str) -> BreakEven:
    """The acceptance rate at which the gain is 1, from the gains at some levels.

    A verification yields 1 + k r tokens, and the gain is that over its cost: concave in r. So the
    logarithm of the gain is a line over log(1 + k r), not over r, and the break-even is where it
    is 0.
    """
    levels: list[_Level] = []
    pairs: list[tuple[float, Interval]] = []
    for rate, summary in points:
        gain = summary.gain(metric)
        if gain is None or not gain.ratio_by_block:
            continue
        found = summary.arm(summary.candidate).all_drafts
        own = found.rate.estimate if found is not None else rate
        pairs.append((own, gain.ratio))
        levels.append(_Level(own, _drafts(found, summary), np.log(np.array(gain.ratio_by_block))))
    return BreakEven(load=load, metric=metric, rate=_crossing(levels), points=tuple(pairs))


@dataclass(frozen=True, slots=True)
class _Level:
    """What was measured with one acceptance forced."""

    rate: float
    drafts: float
    """k: drafts per verification."""
    log_gains_C: Floats


def _drafts(found: AcceptanceBucket | None, summary: AbSummary) -> float:
    """Drafts per verification as counted; else as configured, else five."""
    if found is not None and found.num_steps:
        return found.num_drafted / found.num_steps
    return float((summary.config.get("candidate") or {}).get("k") or 5)


def _crossing(levels: Sequence[_Level]) -> Interval:
    """Where the line crosses 0, as a rate: 0 if below every rate, infinite if above."""
    sizes = np.array([own.log_gains_C.size for own in levels])
    if len(levels) < 2 or np.ptp([own.rate for own in levels]) == 0:
        return unknown()
    k = float(np.mean([own.drafts for own in levels]))
    yields_L = np.array([math.log1p(own.drafts * own.rate) for own in levels])
    means_L = np.array([own.log_gains_C.mean() for own in levels])
    # Starts differ alike at every level, so all levels tell of one spread.
    rest = sum(float(((own.log_gains_C - own.log_gains_C.mean()) ** 2).sum()) for own in levels)
    dof = int(sizes.sum()) - len(levels)
    middle = float(sizes @ yields_L / sizes.sum())
    design_L2 = np.stack([np.ones(len(levels)), yields_L - middle], axis=1)
    inverse_22 = np.linalg.inv((design_L2 * sizes[:, None]).T @ design_L2)
    line_2 = inverse_22 @ (design_L2 * sizes[:, None]).T @ means_L
    if line_2[1] <= 0:
        return unknown(0.0 if means_L.mean() > 0 else math.inf)
    if sizes.min() < FEWEST_BLOCKS:
        return unknown(_rate_at(middle - line_2[0] / line_2[1], k))
    found = quotient(line_2, ((-1.0, 0.0), (0.0, 1.0)), rest / dof * inverse_22, dof)
    ends = (_rate_at(middle + end, k) for end in (found.estimate, found.low, found.high))
    return Interval(*ends)


def _rate_at(log_yield: float, k: float) -> float:
    """The acceptance rate whose yield has this logarithm; 0 below 0, infinite above 1."""
    if log_yield <= 0:
        return 0.0
    rate = math.expm1(min(log_yield, 50.0)) / k
    return rate if rate <= 1 else math.inf
