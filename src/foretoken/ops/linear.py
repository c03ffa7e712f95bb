"""Linear layers: the plain one and, on a CPU, one whose weights are packed once for oneDNN.

Row invariance. A matrix product may add up in another order when it has another number of rows.
`probe_rows` finds, by trying, row counts whose results agree bit for bit; an invariant layer uses
only row counts that were tried, by padding with zero rows and by splitting. So what a row
becomes depends neither on how many rows there are nor on where it stands.

Shape letters: M rows, N outputs, K inputs.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

_ANCHOR = 32
"""Row count whose bits define the class of results that an invariant layer gives."""
_SMALL = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28)
_LARGE = (48, 64, 96, 128, 192, 256, 384, 512)


class Linear(Protocol):
    """x_MK -> x_MK @ weight.T + bias (+ residual_MN)."""

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        """A new [M, N] tensor in x's dtype."""
        ...


class ReferenceLinear:
    """The definition, through PyTorch's own product; any device, any dtype."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        """Keep the weight as it is."""
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        """As `Linear`."""
        y_MN = F.linear(x_MK, self.weight_NK, self.bias_N)
        return y_MN if residual_MN is None else y_MN.add_(residual_MN)


class PackedLinear:
    """The same on a CPU with the weight in oneDNN's blocked layout; bfloat16 and float32.

    The sum with the residual is rounded once instead of twice.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        """Pack a copy; the caller may free the weight."""
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        self._bias_N = bias_N

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        """As `Linear`; x must be contiguous."""
        run = torch.ops.mkldnn._linear_pointwise
        y_MN: Tensor
        if residual_MN is None:
            y_MN = run.default(x_MK, self._packed, self._bias_N, "none", [], "")
        else:
            y_MN = run.binary(x_MK, residual_MN, self._packed, self._bias_N, "add")
        return y_MN


class InvariantLinear:
    """A layer that gives its inner layer only the row counts `sizes`: the same bits for a row."""

    def __init__(self, inner: Linear, sizes: tuple[int, ...]) -> None:
        """`sizes` ascending, not empty: row counts of one bit class."""
        assert sizes, "no row count to use"
        self._inner = inner
        self._largest = sizes[-1]
        self._exact = frozenset(sizes)
        self._sizes = sizes

    def __call__(self, x_MK: Tensor, residual_MN: Tensor | None = None) -> Tensor:
        """As `Linear`."""
        rows = x_MK.shape[0]
        if rows in self._exact:
            return self._inner(x_MK, residual_MN)
        if rows < self._largest:
            return self._padded(x_MK, residual_MN)
        residuals = [None] * rows if residual_MN is None else residual_MN.split(self._largest)
        chunks = zip(x_MK.split(self._largest), residuals, strict=False)
        return torch.cat([self(x, residual) for x, residual in chunks])

    def _padded(self, x_MK: Tensor, residual_MN: Tensor | None) -> Tensor:
        rows = x_MK.shape[0]
        extra = next(size for size in self._sizes if size > rows) - rows
        if residual_MN is not None:
            residual_MN = F.pad(residual_MN, (0, 0, 0, extra))
        return self._inner(F.pad(x_MK, (0, 0, 0, extra)), residual_MN)[:rows]


@dataclass(slots=True)
class LinearFactory:
    """Makes a model's layers; remembers what it probed, since shapes repeat over layers."""

    device: torch.device
    dtype: torch.dtype
    batch_invariant: bool
    _sizes: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)

    def make(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> Linear:
        """The fastest layer for `weight_NK` that keeps the promise asked for."""
        inner: Linear = ReferenceLinear(weight_NK, bias_N)
        if self.device.type == "cpu" and can_pack(self.dtype):
            inner = PackedLinear(weight_NK, bias_N)
        if not self.batch_invariant:
            return inner
        return InvariantLinear(inner, self._probed(inner, weight_NK, bias_N is not None))

    def _probed(self, inner: Linear, weight_NK: Tensor, has_bias: bool) -> tuple[int, ...]:
        if self.device.type != "cpu":
            return (_ANCHOR,)
        key = (tuple(weight_NK.shape), has_bias, torch.get_num_threads())
        if key not in self._sizes:
            self._sizes[key] = probe_rows(inner, *weight_NK.shape, dtype=self.dtype)
        return self._sizes[key]


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine multiply packed weights of `dtype`."""
    if not torch.backends.mkldnn.is_available() or dtype not in (torch.bfloat16, torch.float32):
        return False
    try:
        PackedLinear(torch.ones(16, 16, dtype=dtype))(torch.ones(2, 16, dtype=dtype))
    except RuntimeError:
        return False
    return True


def probe_rows(linear: Linear, outputs: int, inputs: int, *, dtype: torch.dtype) -> tuple[int, ...]:
    """Row counts that give the same bits as 32 rows, ascending, with no failure in between.

    Differences show in about one element in 10,000 where they show at all, so many rows are
    compared, each standing elsewhere than in the reference.

    Args:
        linear: the layer to try.
        outputs: its N; fewer rows are needed when it is large.
        inputs: its K.
        dtype: of x.
    """
    generator = torch.Generator().manual_seed(outputs * 1_000_003 + inputs)
    total = max(_ANCHOR, min(256, 2**20 // outputs // _ANCHOR * _ANCHOR))
    x_MK = torch.randn(total, inputs, generator=generator).to(dtype)
    residual_MN = torch.randn(total, outputs, generator=generator).to(dtype)
    expected = _in_chunks(linear, x_MK, residual_MN, _ANCHOR)

    def agrees(rows: int) -> bool:
        repeats = -(-max(rows, total) // total)
        order = torch.randperm(total, generator=generator).repeat(repeats)
        got = _in_chunks(linear, x_MK[order], residual_MN[order], rows)
        return torch.equal(got, expected[order[: got.shape[0]]])

    below = _while_true(agrees, reversed(_SMALL))
    above = _while_true(agrees, _LARGE)
    return (*reversed(below), _ANCHOR, *above)


def _while_true(agrees: Callable[[int], bool], sizes: Iterable[int]) -> list[int]:
    found: list[int] = []
    for rows in sizes:
        if not agrees(rows):
            break
        found.append(rows)
    return found


def _in_chunks(linear: Linear, x_MK: Tensor, residual_MN: Tensor, rows: int) -> Tensor:
    """Results of whole chunks of `rows` rows; what is left over is left out."""
    whole = x_MK.shape[0] // rows * rows
    chunks = zip(x_MK[:whole].split(rows), residual_MN[:whole].split(rows), strict=True)
    return torch.cat([linear(x, residual) for x, residual in chunks])
