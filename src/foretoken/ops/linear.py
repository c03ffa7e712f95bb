"""Linear layers whose result for a row does not depend on how many rows there are.

`F.linear` is the reference twin. On a CPU, weights packed once by oneDNN are read at close to
memory speed; which numbers of rows give the same bits then depends on the machine, the shape,
the type and the number of threads, so it is measured at load (`RowProbe`) and the layer pads and
splits to stay inside one class. Where no class is found, every call is padded to 32 rows.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

CLASS_ROWS = 32
_PROBE_ROWS = 256
_SMALL = 4 << 20
_ALL_SMALLER = tuple(range(31, 0, -1))
_SOME_SMALLER = (31, 24, 17, 16, 13, 11, 9, 8, 7, 6, 5, 4, 3, 2, 1)
_ALL_LARGER = (33, 40, 47, 48, 63, 64, 65, 80, 96, 100, 127, 128, 129, 160, 200, 255, 256)
_SOME_LARGER = (48, 64, 100, 128, 256)


class Linear(ABC):
    """y = x W^T for rows [T, K] -> [T, N]; no bias."""

    @abstractmethod
    def __call__(self, x_TK: Tensor) -> Tensor:
        """Apply it."""


@final
class PlainLinear(Linear):
    """The reference: any device, any type, rows as they come."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.weight_NK = weight_NK

    def __call__(self, x_TK: Tensor) -> Tensor:
        """F.linear."""
        return F.linear(x_TK, self.weight_NK)


@final
class PackedLinear(Linear):
    """oneDNN over weights that were packed once; bfloat16 and float32 on a CPU."""

    def __init__(self, weight_NK: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        self._apply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x_TK: Tensor) -> Tensor:
        """One oneDNN call."""
        result: Tensor = self._apply(x_TK, self._packed, None, "none", [], "")
        return result


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

    def __call__(self, x_TK: Tensor) -> Tensor:
        """Pad up to min_rows, split by max_rows."""
        num_rows = x_TK.shape[0]
        if self.rows.min_rows <= num_rows <= self.rows.max_rows:
            return self._inner(x_TK)
        if num_rows > self.rows.max_rows:
            return torch.cat([self(piece) for piece in x_TK.split(self.rows.max_rows)])
        padded = x_TK.new_zeros(self.rows.min_rows, x_TK.shape[1])
        padded[:num_rows] = x_TK
        return self._inner(padded)[:num_rows]


class RowProbe:
    """Finds the row class of each shape once; shared by all layers of a load."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._known: dict[tuple[object, ...], RowClass] = {}

    def row_class(self, linear: Linear, weight_NK: Tensor) -> RowClass:
        """The class of 32 rows for weights of this shape, measured with random rows.

        Args:
            linear: the kernel over `weight_NK`.
            weight_NK: shape, type and device are what counts; values do not.
        """
        key = (
            type(linear).__name__,
            tuple(weight_NK.shape),
            weight_NK.dtype,
            str(weight_NK.device),
            torch.get_num_threads(),
        )
        if key not in self._known:
            self._known[key] = _measure(linear, weight_NK)
        return self._known[key]


def _measure(linear: Linear, weight_NK: Tensor) -> RowClass:
    small = weight_NK.nbytes <= _SMALL
    generator = torch.Generator().manual_seed(0)
    x_TK = torch.randn(_PROBE_ROWS, weight_NK.shape[1], generator=generator)
    x_TK = x_TK.to(weight_NK.device, weight_NK.dtype)
    expected = torch.cat([linear(piece) for piece in x_TK.split(CLASS_ROWS)])

    def same(count: int) -> bool:
        whole = _PROBE_ROWS // count * count
        found = torch.cat([linear(piece) for piece in x_TK[:whole].split(count)])
        return torch.equal(found, expected[:whole])

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


def can_pack(weight_NK: Tensor) -> bool:
    """Whether oneDNN packs weights of this type on this machine."""
    if weight_NK.device.type != "cpu" or weight_NK.dtype == torch.float16:
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(weight_NK[:1].contiguous(), None)
    except RuntimeError:
        return False
    return True


def make_linear(weight_NK: Tensor, *, batch_invariant: bool, probe: RowProbe) -> Linear:
    """The fastest linear for these weights, kept inside one row class if asked for."""
    linear = PackedLinear(weight_NK) if can_pack(weight_NK) else PlainLinear(weight_NK)
    if not batch_invariant:
        return linear
    return InvariantLinear(linear, probe.row_class(linear, weight_NK))
