"""An A/B per cell of a grid, each in its own folder.

A grid maps settings (dotted names, or `{placeholders}` of the arms' commands) to values, such as
temperatures, draft lengths, methods, loads and quantizations. Every cell is measured by itself:
nothing is read from gauges that a server has summed up since it started.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.measure.ab import run_or_read
from foretoken.lab.measure.bench import Watch, silent
from foretoken.lab.measure.experiment import AbConfig
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.files import write_json
from foretoken.lab.records.results import AbSummary, AcceptanceBucket
from foretoken.lab.stats.intervals import Interval, unknown

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
        """Its rate."""
        return self.drafts.rate if self.drafts is not None else unknown()

    @property
    def p10(self) -> Interval:
        """Of requests' rates, shrunk to what they share by as much as is noise."""
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
            raise ConfigError(f"grid.{name}", values, "a list of values")
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
            allowed = f"a setting such as load.rate, or {{{name}}} in a command"
            raise ConfigError(f"grid.{name}", value, allowed)
    return from_plain(AbConfig, plain, "settings")


def _set(plain: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        if not isinstance(plain.get(part), dict):
            raise ConfigError(f"grid.{name}", value, f"a setting; there is no {part}")
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
