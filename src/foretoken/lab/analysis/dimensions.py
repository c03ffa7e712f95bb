"""In what several A/Bs differ: in the traffic they were given, or in what was chosen to serve it.

Traffic is not chosen: a configuration has to hold for all of it, or be left out for some.
Configurations compete. Read from what the summaries say of themselves; judges nothing.
"""

import hashlib
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.lab.launch.read import Word, options_of
from foretoken.lab.records.results import AbSummary

Value = float | str
IN_FLIGHT, PER_SECOND, TEMPERATURE = "requests in flight", "requests/s", "temperature"
CONTEXT, CLASS, OUTPUT = "prompt tokens", "class", "output tokens"
LOADS = (IN_FLIGHT, PER_SECOND)
_NEAR = 1.25
"""Measured quantities that differ by less than this factor are taken for the same."""
_NONE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One thing in which runs differ."""

    name: str
    is_traffic: bool
    """False: it was chosen, as draft length or engine version are."""
    values: tuple[Value, ...]

    @property
    def is_number(self) -> bool:
        return all(isinstance(value, float | int) for value in self.values)

    def show(self, index: int) -> str:
        return show_value(self.values[index])


def show_value(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"


def with_unit(value: str, name: str) -> str:
    """`8 requests in flight`, `1 request in flight`, `temperature 0.4`."""
    if value == "1" and name == IN_FLIGHT:
        return "1 request in flight"
    return f"{value} {name}" if name in (*LOADS, CONTEXT, OUTPUT) else f"{name} {value}"


def find_dimensions(runs: Sequence[AbSummary]) -> tuple[Dimension, ...]:
    """Everything in which the runs differ, traffic first; nothing for a single run."""
    traffic = _differing([_traffic(run) for run in runs], is_traffic=True)
    names = {dimension.name for dimension in traffic}
    if CONTEXT in names:
        traffic = [d for d in traffic if d.name != "workload"]
    by_class = next((_parts(d) for d in traffic if d.name == CLASS), None)
    # Classes have prompts of their own lengths: that is no second thing that differs.
    traffic = [d for d in traffic if d.name != CONTEXT or _parts(d) != by_class]
    chosen: list[Dimension] = []
    for found in _differing([_chosen(run) for run in runs], is_traffic=False):
        # A flag shows again in what the server says of itself, with the same runs apart.
        if not any(_parts(found) == _parts(known) for known in chosen):
            chosen.append(found)
    if not traffic and not chosen:
        # The load as it was measured, where nothing else is known to differ.
        loads = tuple(run.arm(run.candidate).requests_per_s for run in runs)
        if len(runs) > 1 and all(map(math.isfinite, loads)) and not _all_near(loads):
            traffic = [Dimension(name=PER_SECOND, is_traffic=True, values=loads)]
    return (*traffic, *chosen)


def _differing(facts: Sequence[Mapping[str, Value]], *, is_traffic: bool) -> list[Dimension]:
    names = dict.fromkeys(name for own in facts for name in own)
    found = []
    for name in names:
        values = tuple(own.get(name, _NONE) for own in facts)
        if len(set(values)) > 1 and not (name == CONTEXT and _all_near(values)):
            found.append(Dimension(name=name, is_traffic=is_traffic, values=values))
    return found


def _all_near(values: Sequence[Value]) -> bool:
    numbers = [value for value in values if not isinstance(value, str)]
    return not numbers or max(numbers) <= _NEAR * min(numbers)


def _parts(dimension: Dimension) -> tuple[int, ...]:
    """Which runs share a value: the index of the first of each run's."""
    return tuple(dimension.values.index(value) for value in dimension.values)


def _traffic(run: AbSummary) -> dict[str, Value]:
    workload = run.config.get("workload") or {}
    load = run.config.get("load") or {}
    found: dict[str, Value] = {}
    if load.get("kind") == "closed":
        found[IN_FLIGHT] = float(load.get("concurrency", 1))
    elif load.get("rate"):
        found[PER_SECOND] = float(load["rate"])
    elif load.get("kind") == "trace":
        found["pace of the trace"] = float(load.get("speed", 1.0))
    temperatures = list(workload.get("temperatures") or ())
    if len(temperatures) == 1:
        found[TEMPERATURE] = float(temperatures[0])
    elif temperatures:
        found[TEMPERATURE] = ", ".join(f"{t:g}" for t in temperatures)
    if workload.get("category"):
        found[CLASS] = str(workload["category"])
    prompt = run.arm(run.baseline).prompt_tokens
    if prompt is not None and math.isfinite(prompt):
        found[CONTEXT] = float(round(prompt))
    if workload.get("max_tokens"):
        found[OUTPUT] = float(workload["max_tokens"])
    found |= {str(k): _word(v) for k, v in (workload.get("parameters") or {}).items()}
    if workload.get("file"):
        path = Path(str(workload["file"]))
        there = path.is_file()
        content = f" ({hashlib.sha256(path.read_bytes()).hexdigest()[:6]})" if there else ""
        found["workload"] = f"{path.name}{content}"
    return found


def _chosen(run: AbSummary) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for side in ("candidate", "baseline"):
        arm = run.arm(getattr(run, side))
        settings = run.config.get(side) or {}
        words = settings.get("command") or arm.server.command
        facts = _flags(words) if words else {}
        for given in (settings.get("extra_body") or {}, settings.get("env") or {}):
            facts |= {name: _word(value) for name, value in given.items()}
        server = arm.server
        said = {"engine": server.engine, "model": server.model, "engine version": server.version}
        facts |= {name: value for name, value in said.items() if value}
        facts.pop("port", None)
        prefix = "" if side == "candidate" else "baseline's "
        found |= {prefix + name: value for name, value in facts.items()}
    if run.environment.get("client_cpu"):
        found["client"] = str(run.environment["client_cpu"])
    return found


def _flags(command: str) -> dict[str, Value]:
    """Flags of a command with their values; JSON values key by key, words by their place."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    found: dict[str, Value] = {}
    place = 0
    for part in options_of([Word(word) for word in words]):
        if part.name:
            found |= {part.name: "yes"} if part.value is True else _named(part.name, part.value)
        else:
            place += 1
            found[f"word {place} of the command"] = part.value
    return found


def _named(name: str, value: str) -> dict[str, Value]:
    try:
        parsed = json.loads(value)
    except ValueError:
        return {name: value}
    if isinstance(parsed, dict):
        # The flag itself says nothing beside its keys.
        return {name: "JSON", **{k: _word(v) for k, v in _flat(parsed).items()}}
    return {name: _word(parsed)}


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, own in value.items():
        found |= _flat(own, f"{prefix}{key}.") if isinstance(own, dict) else {f"{prefix}{key}": own}
    return found


def _word(value: Any) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, default=str)
    return float(value)
