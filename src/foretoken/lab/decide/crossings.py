"""Where a gain passes a limit along what differs between runs, in words."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from foretoken.lab.analysis.crossover import Crossing, find_crossing
from foretoken.lab.analysis.dimensions import (
    CONTEXT,
    IN_FLIGHT,
    LOADS,
    OUTPUT,
    Dimension,
    find_dimensions,
    show_value,
)
from foretoken.lab.decide.evidence import show_metric
from foretoken.lab.records.results import AbSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedCrossing:
    """Where the gain passes a limit as one dimension grows."""

    dimension: str
    where: str
    """What the other dimensions are there; empty if there are none."""
    metric: str
    crossing: Crossing
    measured: tuple[float, float]
    """The least and the most that were measured."""

    @property
    def says(self) -> str:
        """`the gain of TPOT P50 falls below 1.30x at temperature 0.55 [0.48, 0.66]`."""
        found = self.crossing
        low = _end(found.at.low, self.measured, "below")
        high = _end(found.at.high, self.measured, "above")
        verb = "falls below" if found.falls else "rises above"
        place = with_unit(f"{found.at.estimate:.3g} [{low}, {high}]", self.dimension)
        name, where = show_metric(self.metric), f"{place}{self.where}"
        return f"the gain of {name} {verb} {found.limit:.2f}x at {where}"


def _end(value: float, measured: tuple[float, float], word: str) -> str:
    if math.isfinite(value):
        return f"{value:.3g}"
    return f"{word} {show_value(measured[word == 'above'])}"


def with_unit(value: str, name: str) -> str:
    """`8 requests in flight`, `1 request in flight`, `temperature 0.4`."""
    if value == "1" and name == IN_FLIGHT:
        return "1 request in flight"
    return f"{value} {name}" if name in (*LOADS, CONTEXT, OUTPUT) else f"{name} {value}"


def crossings_of(runs: Sequence[AbSummary]) -> tuple[NamedCrossing, ...]:
    """Where the gain of TPOT P50 passes 1, along every number in which the runs differ."""
    return crossings_along(runs, range(len(runs)), find_dimensions(runs), "tpot_p50", (1.0,))


def crossings_along(
    runs: Sequence[AbSummary],
    own: Sequence[int],
    dimensions: Sequence[Dimension],
    metric: str,
    limits: Sequence[float],
) -> tuple[NamedCrossing, ...]:
    """Where the gain passes the limits, along every number in which these runs differ."""
    differing = [d for d in dimensions if len({d.values[i] for i in own}) > 1]
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
                NamedCrossing(dimension=axis.name, where=where, metric=metric, crossing=crossing,
                              measured=(min(values), max(values)))
                for limit in dict.fromkeys(limits)
                if (crossing := find_crossing(points, limit)) is not None
            ]  # fmt: skip
    return tuple(found)
