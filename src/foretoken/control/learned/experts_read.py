"""Experts of a layer that the rows of a step read, as far as that is known before it.

Rows that choose apart from each other read V(n) of them (`share_read`). Rows of one draft or of
requests of one matter choose alike in part: each kind of row counts for a share of one that chooses
apart. How large that share is shows after each step, when what was read is known.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import numpy as np

from foretoken.control.cost import KEEPS, StepShape
from foretoken.control.learned.regression import Floats
from foretoken.shape.mixtures.experts import share_read


@final
class ExpertsRead:
    """Of a mixture with `count` experts in a layer, of which a row has `used`."""

    __slots__ = ("_apart", "count", "used")

    def __init__(self, count: int, used: int, apart: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        """`apart`: what a row of one more sequence, of a draft and of a prompt counts for."""
        self.count, self.used, self._apart = count, used, list(apart)

    def expected(self, shape: StepShape) -> float:
        """What such a step reads."""
        return self.count * share_read(self.used / self.count, self._rows(shape))

    def curve(self, shape: StepShape, most: int) -> Floats:
        """The same with 0 to `most` rows more, float64 [most + 1]."""
        plain, draft, _ = self._apart
        more_M = np.arange(most + 1, dtype=np.float64)
        # Beside prompts as many rows as these have sequences pass for tokens of their own.
        first_M = np.minimum(more_M, max(shape.sequences + shape.prompt_rows - shape.rows, 0))
        rows_M = self._rows(shape) + plain * first_M + draft * (more_M - first_M)
        return self.count * share_read(self.used / self.count, rows_M)

    def observe(self, shape: StepShape, times: int) -> None:
        """A step read `shape.experts`: the mean of so many."""
        further = _further(shape)
        length = sum(rows * rows for rows in further)
        if not length or self.used == self.count:
            return
        # Where all but one are read, or would be, more rows or fewer cannot be told.
        least = 1.0 / self.count
        left = max(1.0 - shape.experts / self.count, least)
        expected = max(1.0 - self.expected(shape) / self.count, least)
        off = math.log(left / expected) / math.log(1.0 - self.used / self.count)
        step = (1.0 - KEEPS**times) * off / length
        both = zip(self._apart, further, strict=True)
        self._apart = [max(share + step * rows, 0.0) for share, rows in both]

    def alike(self, shapes: Iterable[StepShape]) -> list[StepShape]:
        """The same steps if all of their rows chose the same experts: beside those they tell what
        an expert takes from what a row takes."""
        return [shape._replace(experts=float(self.used)) for shape in shapes if shape.rows > 1]

    def to_dict(self) -> dict[str, Any]:
        """What is known, for people and for a later process, which begins with it."""
        return {"count": self.count, "used": self.used, "apart": list(self._apart)}

    def _rows(self, shape: StepShape) -> float:
        """Rows that choose apart which would read as much."""
        return 1.0 + sum(map(float.__mul__, self._apart, _further(shape)))


def _further(shape: StepShape) -> tuple[float, float, float]:
    """Rows beside the first: of other sequences, of drafts, of prompts."""
    decoded = shape.rows - shape.prompt_rows
    plain = min(decoded, shape.sequences)
    if not plain:
        return 0.0, 0.0, shape.prompt_rows - 1.0
    return plain - 1.0, float(decoded - plain), float(shape.prompt_rows)
