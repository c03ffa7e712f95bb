"""Which shapes are timed before an engine serves, in which order, and for how long.

What is timed here is the prior of the models of time. Knows neither models nor devices: whoever
runs them gives a function that takes a shape and says how long it took.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from foretoken.control.cost import CostModel, StepShape
from foretoken.control.learned.drafter_cost import DraftShape

MOST_SECONDS = 3.0
"""Longest time that all of it may take."""
TIMED_SD = 0.1
"""How well a cost is known that was timed at the start."""
PROMISED_SD = 0.4
"""How well a cost is known from a data sheet."""
SHORT, LONG = 32, 1024
"""Contexts, in tokens."""

Shape = TypeVar("Shape", StepShape, DraftShape)


def step_shapes(*, most_sequences: int, most_rows: int, most_context: int) -> list[StepShape]:
    """Some thirty shapes that tell rows, sequences, keys and prompts apart, cheapest first."""
    long = min(LONG, most_context // 2)
    shapes = [
        *(StepShape(rows, 1, SHORT) for rows in (1, 2, 4, 6, 8, 16)),
        *(StepShape(rows, rows, SHORT) for rows in (2, 4, 8, 16, 32, 64)),
        *(StepShape(5 * num, num, SHORT) for num in (2, 4, 8, 16, 32)),
        *(StepShape(3 * num, num, SHORT) for num in (4, 16)),
        *(StepShape(rows, 1, long) for rows in (1, 4, 8)),
        *(StepShape(rows, rows, long) for rows in (4, 16)),
        StepShape(20, 4, long),
        *(StepShape(rows, 1, rows / 2, rows) for rows in (16, 64, 256)),
        StepShape(64, 1, long, 64),
        StepShape(68, 5, SHORT, 64),
    ]
    fitting = [
        shape
        for shape in shapes
        if shape.sequences <= most_sequences
        and shape.rows <= most_rows
        and shape.context + shape.rows / shape.sequences <= most_context
    ]
    unique = dict.fromkeys(fitting)
    return sorted(unique, key=lambda shape: shape.rows + shape.sequences * shape.context / 256)


def draft_lengths(most: int) -> tuple[int, ...]:
    """Lengths of draft that tell a pass from the rest."""
    return (1,) if most == 1 else (1, most)


def calibrate(
    measure: Callable[[Shape], float],
    shapes: Iterable[Shape],
    *,
    repeats: int = 3,
    most_seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[tuple[Shape, float]]:
    """The shortest time of each shape, of as many as fit into `most_seconds`.

    The first round goes through them in order, so begin with the cheap ones; it also warms up.
    Later rounds are shuffled, so that a machine that grows slower meanwhile makes no shape dear.
    The shortest of so few is the one that a busy neighbour disturbed least; how much a neighbour
    takes is learnt later, as the level of all costs.
    """
    began = clock()
    times: dict[Shape, list[float]] = {}
    for shape in shapes:
        times[shape] = [measure(shape)]
        if clock() - began > most_seconds / repeats:
            break
    order = list(times)
    shuffle = random.Random(0).shuffle
    for _ in range(repeats - 1):
        shuffle(order)
        for shape in order:
            left = most_seconds - (clock() - began)
            if left < times[shape][0]:
                continue
            times[shape].append(measure(shape))
    return [(shape, min(found)) for shape, found in times.items()]


def promised(cost: CostModel, shapes: Sequence[StepShape]) -> list[tuple[StepShape, float]]:
    """A prior where nothing can be timed: what a roofline says of the same shapes."""
    return [(shape, cost.seconds(shape)) for shape in shapes]
