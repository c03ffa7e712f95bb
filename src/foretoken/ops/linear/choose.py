"""Chooses the linear layer for given weights."""

import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.kernels.linear import pack_float
from foretoken.ops.linear.base import Linear, PlainLinear
from foretoken.ops.linear.kernel import KernelLinear, can_use
from foretoken.ops.linear.packed import PackedLinear, can_pack
from foretoken.ops.linear.probe import InvariantLinear, RowProbe


def make_linear(
    weight_NK: Tensor,
    *,
    probe: RowProbe | None,
    bias_N: Tensor | None = None,
    adds_residual: bool = False,
    wide: bool = False,
) -> Linear:
    """The fastest linear for these weights; given a probe, a row's bits are its own.

    Args:
        weight_NK: packed if that is faster.
        probe: measures the row class where it has to be; None: no promise about bits.
        bias_N: added to every row, in the type of the weights.
        adds_residual: whether it will be given residuals.
        wide: results in float32, if that costs nothing.
    """
    library = find_library()
    if library is not None and can_use(weight_NK):
        library.use_threads(torch.get_num_threads())
        out = torch.float32 if wide else None
        packed = pack_float(library, weight_NK)
        return KernelLinear(library, packed, dtype=weight_NK.dtype, out_dtype=out, bias_N=bias_N)
    packs = can_pack(weight_NK)
    linear = PackedLinear(weight_NK, bias_N) if packs else PlainLinear(weight_NK, bias_N)
    if probe is None:
        return linear
    rows = probe.row_class(
        linear, weight_NK, adds_residual=adds_residual, adds_bias=bias_N is not None
    )
    return InvariantLinear(linear, rows)
