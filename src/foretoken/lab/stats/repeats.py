"""A few arms that are repeated in turns: who goes when, and the interval of what came of it.

For comparisons inside one process, where a repeat or a prompt is the unit of chance; servers that
start anew are compared by `ratios`. Pure Python, so that a command line that only prints its help
need not load numpy.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
LEVEL = 0.95


def in_turn(arms: Sequence[T], turn: int) -> list[T]:
    """The arms in the order of a turn, so that drift of the machine hits all alike. Rotated by one
    each turn: everyone goes first equally often. From three arms on the direction changes every
    round: nobody always follows the same one."""
    by = turn % len(arms)
    order = [*arms[by:], *arms[:by]]
    backwards = len(arms) > 2 and (turn // len(arms)) % 2
    return order[::-1] if backwards else order


def bootstrap_ends(
    sample: Sequence[T], statistic: Callable[[Sequence[T]], float], *, resamples: int
) -> tuple[float, float]:
    """Ends of the 95 % percentile interval (Efron 1979) of a statistic of `sample`. A sample of one
    says nothing about chance: both ends are its statistic."""
    if len(sample) == 1 or resamples == 0:
        return statistic(sample), statistic(sample)
    rng = random.Random(0)
    drawn = sorted(statistic(rng.choices(sample, k=len(sample))) for _ in range(resamples))
    tail = (1.0 - LEVEL) / 2.0
    return drawn[int(tail * resamples)], drawn[int((1.0 - tail) * resamples)]
