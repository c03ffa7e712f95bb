"""In what several A/Bs differ: in the traffic they were given, or in what was chosen to serve it;
and where along a number a gain passes a limit.

Traffic is not chosen: a configuration has to hold for all of it, or be left out for some.
Configurations compete. Read from what the summaries say of themselves; judges nothing.

Between two neighbouring measurements the logarithm of the gain is taken for a straight line, over
the logarithm of the quantity where it spans a wide range. The interval of a passing draws each
measured gain again from Student's t of its own blocks. What the straight line hides is not in it.
"""

import hashlib
import json
import math
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foretoken.lab.launch.launch import typed
from foretoken.lab.launch.read import Word, options_of
from foretoken.lab.records.results import AbSummary, ArmGain
from foretoken.lab.stats.intervals import LEVEL, Floats, Interval
from foretoken.lab.stats.ratios import FEWEST_BLOCKS, standard_error

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

    def differs(self, indices: Iterable[int]) -> bool:
        return len({self.values[i] for i in indices}) > 1

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
    kinds = {"closed": (IN_FLIGHT, "concurrency"), "trace": ("pace of the trace", "speed")}
    name, key = kinds.get(load.get("kind", ""), (PER_SECOND, "rate"))
    if load.get(key):
        found[name] = float(load[key])
    if heats := workload.get("temperatures"):
        listed = ", ".join(f"{t:g}" for t in heats)
        found[TEMPERATURE] = float(heats[0]) if len(heats) == 1 else listed
    if workload.get("category"):
        found[CLASS] = str(workload["category"])
    prompt = run.arm(run.baseline).prompt_tokens
    if prompt is not None and math.isfinite(prompt):
        found[CONTEXT] = float(round(prompt))
    if workload.get("max_tokens"):
        found[OUTPUT] = float(workload["max_tokens"])
    found |= _flat(workload.get("parameters") or {})
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
        facts |= _flat({**(settings.get("extra_body") or {}), **(settings.get("env") or {})})
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
            value = typed(part.value)
            # The flag itself says nothing beside the keys of its JSON.
            is_json = isinstance(value, dict)
            found |= {part.name: "JSON", **_flat(value)} if is_json else _flat({part.name: value})
        else:
            place += 1
            found[f"word {place} of the command"] = part.value
    return found


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    found: dict[str, Value] = {}
    for key, own in value.items():
        name = f"{prefix}{key}"
        found |= _flat(own, f"{name}.") if isinstance(own, dict) else {name: _word(own)}
    return found


def _word(value: Any) -> Value:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value if isinstance(value, str) else json.dumps(value, default=str)
    return float(value)


RESAMPLES = 4000
_WIDE = 4.0
"""Largest over smallest value from which a quantity is taken by its logarithm, as loads are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """Where the gain passes a limit as one dimension grows."""

    dimension: str
    where: str
    """What the other dimensions are there; empty if there are none."""
    metric: str
    limit: float
    falls: bool
    """True: below it from there on; False: above it."""
    at: Interval
    """Ends are infinite where they lie outside what was measured; all of it is unknown in NaN."""
    measured: tuple[float, float]

    @property
    def says(self) -> str:
        """`the gain of TPOT P50 falls below 1.30x at temperature 0.55 [0.48, 0.66]`."""
        ends = [
            f"{end:.3g}" if math.isfinite(end) else f"{word} {show_value(last)}"
            for end, word, last in zip(
                (self.at.low, self.at.high), ("below", "above"), self.measured, strict=True
            )
        ]
        place = with_unit(f"{self.at.estimate:.3g} [{', '.join(ends)}]", self.dimension)
        verb = "falls below" if self.falls else "rises above"
        name = show_metric(self.metric)
        return f"the gain of {name} {verb} {self.limit:.2f}x at {place}{self.where}"


def show_metric(metric: str) -> str:
    return metric.replace("_", " ").upper()


def spans_widely(least: float, most: float) -> bool:
    """Whether a quantity that was measured from `least` to `most` is taken by its logarithm."""
    return least > 0 and most >= _WIDE * least


def find_crossing(
    points: Sequence[tuple[float, ArmGain]], limit: float, *, straight: bool = False
) -> tuple[bool, Interval] | None:
    """The first passing of `limit`: whether the gain falls there, and where. None if all points are
    on one side of it. `straight`: the logarithm of the gain is a line over the points as they are,
    however widely they span."""
    known = [(x, gain) for x, gain in points if math.isfinite(gain.ratio.estimate)]
    known.sort(key=lambda point: point[0])
    if len(known) < 2:
        return None
    x_N = np.array([x for x, _ in known], np.float64)
    logs_N = np.log([gain.ratio.estimate for _, gain in known]) - math.log(limit)
    falls = bool(logs_N[0] >= 0)
    above_N = logs_N if falls else -logs_N
    if not (logs_N < 0 if falls else logs_N >= 0).any():
        return None
    wide = not straight and spans_widely(x_N[0], x_N[-1])
    scale_N = np.log(x_N) if wide else x_N
    point = float(_first_passing(scale_N, above_N[None, :])[0])
    low, high = _ends(scale_N, above_N, [gain for _, gain in known])
    at, low, high = (math.exp(v) if wide and math.isfinite(v) else v for v in (point, low, high))
    return falls, Interval(at, min(at, low), max(at, high))


def _ends(scale_N: Floats, logs_N: Floats, gains: Sequence[ArmGain]) -> tuple[float, float]:
    """Quantiles of the passing when every gain is drawn again; unknown with too few blocks."""
    errors = [standard_error(gain.ratio, gain.num_blocks) for gain in gains]
    if not all(math.isfinite(error) for error in errors):
        return -math.inf, math.inf
    degrees_N = np.array([max(gain.num_blocks, FEWEST_BLOCKS) - 1 for gain in gains])
    rng = np.random.default_rng(0)
    drawn_RN = logs_N + np.array(errors) * rng.standard_t(degrees_N, (RESAMPLES, logs_N.size))
    found_R = np.sort(_first_passing(scale_N, drawn_RN))
    tail = (1 - LEVEL) / 2
    return float(found_R[int(tail * RESAMPLES)]), float(found_R[int((1 - tail) * RESAMPLES)])


def _first_passing(scale_N: Floats, above_RN: Floats) -> Floats:
    """Per row, where it first falls below 0: -inf if it begins there, +inf if it never does."""
    below_RN = above_RN < 0
    index_R = np.argmax(below_RN, axis=1)
    rows_R = np.arange(above_RN.shape[0])
    before_R = np.maximum(index_R - 1, 0)
    top_R, bottom_R = above_RN[rows_R, before_R], above_RN[rows_R, index_R]
    with np.errstate(divide="ignore", invalid="ignore"):
        share_R = top_R / (top_R - bottom_R)
        at_R = scale_N[before_R] + share_R * (scale_N[index_R] - scale_N[before_R])
    at_R = np.where(index_R == 0, -np.inf, at_R)
    return np.where(below_RN.any(axis=1), at_R, np.inf)


def crossings_along(
    runs: Sequence[AbSummary],
    own: Sequence[int],
    dimensions: Sequence[Dimension],
    metric: str = "tpot_p50",
    limits: Sequence[float] = (1.0,),
) -> tuple[Crossing, ...]:
    """Where the gain passes the limits, along every number in which `own` of the runs differ."""
    differing = [d for d in dimensions if d.differs(own)]
    found = []
    for axis in (d for d in differing if d.is_traffic and d.is_number):
        apart: dict[str, list[int]] = defaultdict(list)
        for i in own:
            rest = (f", {d.name} {d.show(i)}" for d in differing if d is not axis)
            apart["".join(rest)].append(i)
        for where, indices in apart.items():
            values = [float(axis.values[i]) for i in indices]
            gains = [runs[i].gain(metric) for i in indices]
            points = [(x, g) for x, g in zip(values, gains, strict=True) if g is not None]
            found += [
                Crossing(dimension=axis.name, where=where, metric=metric, limit=limit,
                         falls=passing[0], at=passing[1], measured=(min(values), max(values)))
                for limit in dict.fromkeys(limits)
                if (passing := find_crossing(points, limit)) is not None
            ]  # fmt: skip
    return tuple(found)
