"""Rows of logits to tokens in one call into C (native/draw.h), greedy rows and drawn ones alike.

The reference twin is `foretoken.ops.sampling`. Invariant: where the kernel decides, it decides what
the twin decides; a row whose best two ids are within rounding of each other it leaves to the twin.
"""

import ctypes
import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple, final

from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.structures import DRAW_ROW, address_of
from foretoken.ops.logits import NEVER, bounded

UNDECIDED = -1


class Drawing(NamedTuple):
    """How a row's token is chosen: ft_draw_row without the key."""

    temperature: float
    """What logits are divided by; 0: the best id is taken."""
    log_min_p: float
    top_p: float
    top_k: int

    @classmethod
    def of(cls, temperature: float, filters: tuple[float, int, float] | None) -> "Drawing":
        """Draw at a temperature, through (min_p, top_k, top_p) in the sense of SamplingParams."""
        min_p, top_k, top_p = filters or (0.0, 0, 1.0)
        return cls(
            bounded(temperature),
            math.log(min_p) if min_p > 0 else NEVER,
            top_p if top_p < 1 else 2.0,
            max(top_k, 0),
        )


BEST = Drawing(0.0, NEVER, 2.0, 0)
PLAIN = Drawing(1.0, NEVER, 2.0, 0)


def pack_rows(keys: Sequence[int], how: Drawing) -> bytes:
    """Rows that are drawn alike, each with its noise key, as C wants them."""
    return b"".join(DRAW_ROW.pack(key, *how) for key in keys)


@final
class DrawKernel:
    """The call; logits lie on the CPU."""

    def __init__(self, library: Library) -> None:
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._draw = library.function("ft_draw", (ctypes.c_char_p, count, pointer, count, pointer))

    def __call__(self, logits_RV: Tensor, rows: bytes) -> list[int]:
        """The token of each row, or UNDECIDED.

        Args:
            logits_RV: float32, edits applied, temperature and filters not.
            rows: R of `pack_rows`.
        """
        count, vocabulary = logits_RV.shape
        assert len(rows) == DRAW_ROW.size * count, (len(rows), count)
        logits_RV = logits_RV.contiguous()
        ids = array("q", bytes(8 * count))
        self._draw(rows, count, logits_RV.data_ptr(), vocabulary, address_of(ids))
        return ids.tolist()
