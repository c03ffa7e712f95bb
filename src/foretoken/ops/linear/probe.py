"""Keeps a kernel whose bits depend on the number of rows inside one class of numbers.

Which numbers of rows give the same bits depends on the machine, the shape, the type and the number
of threads, so it is measured at load (`RowProbe`), and the layer pads and splits to stay inside.
Where no class is found, every call is padded to 32 rows.
"""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.ops.linear.base import Linear

CLASS_ROWS = 32
_PROBE_ROWS = 256
_SCALE, _MOST = 16.0, 2.0**14
"""Of numbers in a probe's rows: they are what a sum is made of, not its bias; and what float16 can
hold of them, where a weight is next to nothing."""
_SMALL = 4 << 20
_ALL_SMALLER = tuple(range(31, 0, -1))
_SOME_SMALLER = (31, 24, 17, 16, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1)
_ALL_LARGER = (33, 40, 47, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 160, 200, 255, 256)
_SOME_LARGER = (48, 64, 100, 128, 256)


@dataclass(frozen=True, slots=True)
class RowClass:
    """Every number of rows in [min_rows, max_rows] gives the same bits per row."""

    min_rows: int
    max_rows: int


@final
class InvariantLinear(Linear):
    """Any number of rows, always computed inside one class."""

    def __init__(self, inner: Linear, rows: RowClass) -> None:
        self._inner = inner
        self.rows = rows

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Pad up to min_rows, split by max_rows."""
        num_rows, largest = x_TK.shape[0], self.rows.max_rows
        if self.rows.min_rows <= num_rows <= largest:
            return self._inner(x_TK, residual_TN)
        if num_rows < largest:
            extra = (0, 0, 0, self.rows.min_rows - num_rows)
            padded = None if residual_TN is None else F.pad(residual_TN, extra)
            return self._inner(F.pad(x_TK, extra), padded)[:num_rows]
        pieces = x_TK.split(largest)
        residuals = [None] * len(pieces) if residual_TN is None else residual_TN.split(largest)
        return torch.cat([self(x, r) for x, r in zip(pieces, residuals, strict=True)])


class RowProbe:
    """Finds the row class of each shape once; shared by all layers of a load."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], RowClass] = {}

    def row_class(
        self,
        linear: Linear,
        weight_NK: Tensor,
        *,
        adds_residual: bool = False,
        bias_N: Tensor | None = None,
    ) -> RowClass:
        """The class of 32 rows for weights of this shape, measured with random rows; in 16 bits a
        sum of each is made to cancel, which shows the order that it was added in.

        Args:
            linear: the kernel over `weight_NK`.
            weight_NK: those of `linear`; layers of one shape, type and device share what was found.
            adds_residual: whether it will be given residuals.
            bias_N: that of `linear`, if it has one.
        """
        key = (
            type(linear).__name__,
            tuple(weight_NK.shape),
            weight_NK.dtype,
            str(weight_NK.device),
            torch.get_num_threads(),
            adds_residual,
            bias_N is not None,
        )
        if key not in self._known:
            self._known[key] = _measure(linear, weight_NK, bias_N, adds_residual)
        return self._known[key]


def _cancel(x_TK: Tensor, weight_TK: Tensor, bias_T: Tensor | None) -> None:
    """Change three numbers of each row of `x_TK` so that its product with the same row of
    `weight_TK`, and the bias, is zero up to the rounding of sums: each takes what the ones before
    it left over by their own rounding."""
    weights = weight_TK.double()
    columns_T3 = weights.abs().topk(min(3, weights.shape[1]), dim=1).indices
    x_TK.scatter_(1, columns_T3, 0.0)
    for column_T1 in columns_T3.split(1, dim=1):
        left_T1 = (x_TK.double() * weights).sum(1, keepdim=True)
        if bias_T is not None:
            left_T1 += bias_T.double()[:, None]
        found_T1 = torch.nan_to_num(-left_T1 / weights.gather(1, column_T1))
        x_TK.scatter_(1, column_T1, found_T1.clamp(-_MOST, _MOST).to(x_TK.dtype))


def _measure(
    linear: Linear, weight_NK: Tensor, bias_N: Tensor | None, adds_residual: bool
) -> RowClass:
    small = weight_NK.nbytes <= _SMALL
    generator = torch.Generator().manual_seed(0)

    def randn(columns: int) -> Tensor:
        values = torch.randn(_PROBE_ROWS, columns, generator=generator)
        return values.to(weight_NK.device, weight_NK.dtype)

    x_TK = _SCALE * randn(weight_NK.shape[1])
    residual_TN = randn(weight_NK.shape[0]) if adds_residual else None
    if x_TK.element_size() < 4:  # hardly a result of 16 bits shows in which order it was summed up
        step = max(1, weight_NK.shape[0] // _PROBE_ROWS)
        outputs_T = step * torch.arange(_PROBE_ROWS, device=x_TK.device) % weight_NK.shape[0]
        _cancel(x_TK, weight_NK[outputs_T], None if bias_N is None else bias_N[outputs_T])
        if residual_TN is not None:
            residual_TN.scatter_(1, outputs_T[:, None], 0.0)

    def run(count: int) -> Tensor:
        """All whole pieces of `count` rows."""
        starts = range(0, _PROBE_ROWS - count + 1, count)
        pieces = (slice(start, start + count) for start in starts)
        if residual_TN is None:
            return torch.cat([linear(x_TK[piece]) for piece in pieces])
        return torch.cat([linear(x_TK[piece], residual_TN[piece]) for piece in pieces])

    expected = run(CLASS_ROWS)

    def same(count: int) -> bool:
        found = run(count)
        return torch.equal(found, expected[: found.shape[0]])

    low = high = CLASS_ROWS
    for count in _ALL_SMALLER if small else _SOME_SMALLER:
        if not same(count):
            break
        low = count
    for count in _ALL_LARGER if small else _SOME_LARGER:
        if not same(count):
            break
        high = count
    return RowClass(low, high if high >= 48 else CLASS_ROWS)
