"""Where a gain passes a limit, over several A/Bs in order of one quantity, with its interval.

Between two neighbouring measurements the logarithm of the gain is taken for a straight line, over
the logarithm of the quantity where it spans a wide range. The interval draws each measured gain
again from Student's t of its own blocks. What the straight line hides is not in it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foretoken.lab.analysis.dimensions import Dimension, show_value, with_unit
from foretoken.lab.records.results import AbSummary, ArmGain
from foretoken.lab.stats.intervals import LEVEL, Floats, Interval
from foretoken.lab.stats.ratios import FEWEST_BLOCKS, standard_error

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
    points: Sequence[tuple[float, ArmGain]], limit: float, *, seed: int = 0
) -> tuple[bool, Interval] | None:
    """The first passing of `limit`: whether the gain falls there, and where. None if all points are
    on one side of it."""
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
    wide = spans_widely(x_N[0], x_N[-1])
    scale_N = np.log(x_N) if wide else x_N
    point = float(_first_passing(scale_N, above_N[None, :])[0])
    low, high = _ends(scale_N, above_N, [gain for _, gain in known], seed)
    at, low, high = (math.exp(v) if wide and math.isfinite(v) else v for v in (point, low, high))
    return falls, Interval(at, min(at, low), max(at, high))


def _ends(
    scale_N: Floats, logs_N: Floats, gains: Sequence[ArmGain], seed: int
) -> tuple[float, float]:
    """Quantiles of the passing when every gain is drawn again; unknown with too few blocks."""
    errors = [standard_error(gain.ratio, gain.num_blocks) for gain in gains]
    if not all(math.isfinite(error) for error in errors):
        return -math.inf, math.inf
    degrees_N = np.array([max(gain.num_blocks, FEWEST_BLOCKS) - 1 for gain in gains])
    rng = np.random.default_rng(seed)
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
                Crossing(dimension=axis.name, where=where, metric=metric, limit=limit,
                         falls=passing[0], at=passing[1], measured=(min(values), max(values)))
                for limit in dict.fromkeys(limits)
                if (passing := find_crossing(points, limit)) is not None
            ]  # fmt: skip
    return tuple(found)
