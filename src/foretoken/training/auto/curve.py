"""What more training would bring, from how a run went so far.

Pure arithmetic. Tokens a verification grow about as the logarithm of the steps, which is how these
runs look and no law: what follows from it is a guess, and says so.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FEWEST_POINTS = 4
SETTLED = 0.25
"""Points before this share of the steps say little about the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubling:
    """What twice the steps would add to the tokens a verification, as far as the curve goes on."""

    now: float
    """Tokens a verification when the run was last measured, as its guesses on held-out text say."""
    tokens: float
    low: float
    high: float
    """Ends of the 95 % interval of the line through the measurements."""


def doubling(history: Sequence[Mapping[str, float]], decays_from: float) -> Doubling | None:
    """The slope of tokens a verification over the binary logarithm of the steps.

    Args:
        history: measurements of a run, with `step` and `tokens_a_step`.
        decays_from: the step at which the rates began to fall, which lifts what comes after.

    Returns:
        None where there are too few measurements.
    """
    points = [
        (math.log2(row["step"]), row["tokens_a_step"])
        for row in history
        if SETTLED * decays_from <= row["step"] <= decays_from and row["step"] > 0
    ]
    if len({x for x, _ in points}) < FEWEST_POINTS:
        return None
    count = len(points)
    middle = sum(x for x, _ in points) / count
    level = sum(y for _, y in points) / count
    spread = sum((x - middle) ** 2 for x, _ in points)
    slope = sum((x - middle) * (y - level) for x, y in points) / spread
    rest = sum((y - level - slope * (x - middle)) ** 2 for x, y in points)
    half = _t(count - 2) * math.sqrt(rest / (count - 2) / spread)
    return Doubling(
        now=history[-1]["tokens_a_step"], tokens=slope, low=slope - half, high=slope + half
    )


def _t(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution (Cornish and Fisher's first terms)."""
    z = 1.96
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second
