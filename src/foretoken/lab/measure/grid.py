"""Many A/Bs, each in its own folder: a grid of settings, and acceptance forced level by level.

A grid maps settings (dotted names, or `{placeholders}` of the arms' commands) to values, such as
temperatures, draft lengths, methods, loads and quantizations. Every cell is measured by itself:
nothing is read from gauges that a server has summed up since it started.

Forced acceptance tells the break-even of a system before there is a draft. vLLM and Foretoken
(`rejection_sample_method` synthetic) and llama.cpp (`--spec-synth-*`) can be told what share of
drafts to accept; elsewhere drafts of known agreement can stand in. Where the gain over plain
decoding crosses 1 is the acceptance that a draft has to reach, in every other cell of the grid.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError, one_of
from foretoken.lab.analysis.dimensions import find_crossing
from foretoken.lab.analysis.summary import enough_drafts, num_verifications
from foretoken.lab.measure.ab import run_ab, silent
from foretoken.lab.measure.experiment import AbConfig, ArmConfig
from foretoken.lab.measure.segments import Watch
from foretoken.lab.measure.workload import Load
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.results import AbSummary
from foretoken.lab.records.run_files import GRID, finished_ab, write_json
from foretoken.lab.stats.intervals import Interval, unknown

Values = dict[str, Any]
Grid = Mapping[str, Sequence[Any]]
FORCED = "forced_acceptance"
"""The axis whose values are chances of a draft token."""
METRIC = "tpot_mean"
"""The gain that has to reach 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    values: Values
    summary: AbSummary

    def row(self) -> dict[str, Any]:
        names = ("tpot_p50", "tpot_p99", "ttft_p50", "ttft_p99", "e2e_mean", "tokens_per_s",
                 "goodput")  # fmt: skip
        gains = {name: self.summary.gain(name) for name in names}
        arm = self.summary.arm(self.summary.candidate)
        return {
            "values": self.values,
            "folder": folder_of(self.values),
            "gains": {name: to_plain(gain.ratio) for name, gain in gains.items() if gain},
            "num_steps": num_verifications(arm),
            "enough_steps": enough_drafts(arm),
            "acceptance": [to_plain(b) for b in (*arm.buckets("all"), *arm.buckets("temperature"))],
        }


def cells_of(grid: Grid) -> list[Values]:
    """Every combination, the last name turning fastest."""
    rows = itertools.product(*grid.values())
    return [dict(zip(grid, row, strict=True)) for row in rows]


SHORT = {
    "temperature": "workload.temperatures",
    "max_tokens": "workload.max_tokens",
    "class": "workload.category",
    "concurrency": "load.concurrency",
    "rate": "load.rate",
}
"""Names of a grid that need no dots, and the settings they stand for."""


def apply(config: AbConfig, values: Values) -> AbConfig:
    """The settings of a cell. Raises ConfigError: a value has neither a setting nor a placeholder
    to go to, or acceptance is to be forced by no chance, or where the candidate has nothing to
    turn."""
    if FORCED in values:
        rate = values[FORCED]
        if not isinstance(rate, int | float) or not 0 <= rate <= 1:
            allowed = "chances of a draft token from 0 to 1, such as 0,0.5,0.9"
            raise ConfigError("--force-acceptance", rate, allowed)
        assert config.candidate is not None, "two arms are compared"
        # Texts are garbage then, so lengths are fixed.
        parameters = {"ignore_eos": True, **config.workload.parameters}
        workload = replace(config.workload, parameters=parameters)
        config = replace(config, workload=workload, candidate=turned(config.candidate, rate))
    plain: dict[str, Any] = to_plain(config)
    for name, value in values.items():
        if name == FORCED or _fill(plain, name, value):
            continue
        if name not in SHORT and "." not in name:
            flag = f"--{name.replace('_', '-')} {{{name}}}"
            known = [key for key in SHORT if key != name]
            allowed = (
                f"{{{name}}} in the candidate's command, such as --candidate '... {flag}' with "
                f"--grid {name}={value}; without braces {one_of(name, known)}, or a setting with "
                "dots such as load.burstiness"
            )
            raise ConfigError(f"--grid {name}", value, allowed)
        *path, last = SHORT.get(name, name).split(".")
        place = plain
        for part in path:
            if not isinstance(place.get(part), dict):
                groups = [key for key, own in place.items() if isinstance(own, dict)]
                allowed = f"a setting; of {part!r} there is none: {one_of(part, groups)}"
                raise ConfigError(f"--grid {name}", value, allowed)
            place = place[part]
        place[last] = [value] if name == "temperature" else value
        # Requests in flight mean a closed loop, and a rate an open one.
        if name == "concurrency":
            plain["load"]["kind"] = "closed"
        elif name == "rate" and plain["load"]["kind"] not in ("constant", "poisson", "gamma"):
            plain["load"]["kind"] = "poisson"
    return from_plain(AbConfig, plain, "settings")


def _fill(plain: dict[str, Any], name: str, value: Any) -> bool:
    found = False
    text = value if isinstance(value, str) else json.dumps(value)
    for arm in (plain["baseline"], plain["candidate"]):
        if f"{{{name}}}" in (arm["command"] or ""):
            arm["command"] = arm["command"].replace(f"{{{name}}}", text)
            found = True
    return found


def folder_of(values: Values) -> str:
    words = "_".join(f"{name.split('.')[-1]}-{value}" for name, value in values.items())
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in words)[:120] or "cell"


def run_grid(
    config: AbConfig, grid: Grid, out: Path, *, resume: bool = False, watch: Watch = silent
) -> list[Cell]:
    """Measure every cell; with `resume`, finished ones are read instead. Raises ConfigError: the
    grid does not fit the settings; EndpointError: no server."""
    todo = [(values, apply(config, values)) for values in cells_of(grid)]
    cells: list[Cell] = []
    for values, settings in todo:
        folder = out / folder_of(values)
        summary = finished_ab(folder) if resume else None  # read again it is no further look
        summary = summary or run_ab(settings, folder, resume=resume, watch=watch)
        cells.append(Cell(values=values, summary=summary))
        rows = [cell.row() for cell in cells]
        write_json(out / GRID, {"kind": "grid", "schema": 1, "forced": FORCED in grid,
                                "cells": rows})  # fmt: skip
    return cells


def turned(arm: ArmConfig, rate: float) -> ArmConfig:
    """The arm with its acceptance set. `{rate}` becomes the chance of each draft token; `{rates:K}`
    a list of K unconditional per-position rates of it, as vLLM and Foretoken take them;
    `{length:K}` the acceptance length; `{percent}` the chance in whole percent, as part of a
    draft's name."""
    command = arm.command or ""
    for k in range(1, 33):
        powers = [round(rate**i, 6) for i in range(1, k + 1)]
        command = command.replace(f"{{rates:{k}}}", json.dumps(powers))
        command = command.replace(f"{{length:{k}}}", f"{ConstantAcceptance(rate).length(k):.6g}")
    command = command.replace("{rate}", f"{rate:g}").replace("{percent}", f"{100 * rate:.0f}")
    if command == (arm.command or ""):
        allowed = "a command with {rate}, {rates:K}, {length:K} or {percent}, which sets acceptance"
        raise ConfigError("--candidate", arm.command or arm.url, allowed)
    return replace(arm, command=command)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    values: Values
    """Of the other axes of the grid."""
    load: str
    metric: str
    rate: Interval
    """Draft acceptance rate at which the gain is 1; 0: it always pays, infinite: never."""
    points: tuple[tuple[float, Interval], ...]
    """(Rate, gain) as measured."""


def break_evens(cells: Sequence[Cell]) -> list[BreakEven]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        others = {name: value for name, value in cell.values.items() if name != FORCED}
        found.setdefault(json.dumps(others), []).append(cell)
    return [
        find_break_even([(cell.values[FORCED], cell.summary) for cell in own], json.loads(others))
        for others, own in found.items()
    ]


def find_break_even(
    points: Sequence[tuple[float, AbSummary]], values: Values | None = None
) -> BreakEven:
    """The acceptance rate at which the gain is 1, from the gains at some levels. A verification
    yields 1 + k r tokens, and the gain is that over its cost: concave in r. So the logarithm of the
    gain is a line over log(1 + k r), not over r, and the break-even is where it passes 0."""
    drafts, seen, pairs = [], [], []
    for rate, summary in points:
        gain = summary.gain(METRIC)
        if gain is None or not math.isfinite(gain.ratio.estimate):
            continue
        found = summary.arm(summary.candidate).all_drafts
        k = found.num_drafted / found.num_steps if found is not None and found.num_steps else 5.0
        rate = found.rate.estimate if found is not None else rate
        drafts.append(k)
        seen.append((math.log1p(k * rate), gain))
        pairs.append((rate, gain.ratio))
    settings = points[0][1].config.get("load")
    load = str(from_plain(Load, settings)) if settings else ""
    at = unknown()
    if len(seen) > 1:
        passing = find_crossing(seen, 1.0, straight=True)
        at = unknown(
            0.0 if min(seen, key=lambda point: point[0])[1].ratio.estimate >= 1 else math.inf
        )
        if passing is not None and not passing[0]:
            ends = (passing[1].estimate, passing[1].low, passing[1].high)
            at = Interval(*(_rate_at(end, float(np.mean(drafts))) for end in ends))
    return BreakEven(values=values or {}, load=load, metric=METRIC, rate=at, points=tuple(pairs))


def _rate_at(log_yield: float, k: float) -> float:
    """The acceptance rate whose yield has this logarithm; 0 below 0, infinite above 1."""
    if log_yield <= 0:
        return 0.0
    rate = math.expm1(min(log_yield, 50.0)) / k
    return rate if rate <= 1 else math.inf
