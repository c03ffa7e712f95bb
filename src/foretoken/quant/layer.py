"""Linear layers over integer weights: the kernels' where there are any, else dequantized.

On a CPU they are compiled C, on a GPU Triton's. Without kernels, or where they have no such
groups, the weights are dequantized once and stay in the rows' type: the same model up to
rounding, without the memory saved.
"""

import torch
from torch import Tensor

from foretoken.kernels.library import Library, find_library
from foretoken.kernels.linear import PANEL, TYPES, Packed, pack_int4, pack_int8, stack_packed
from foretoken.ops.linear import KernelLinear, Linear, RowProbe, make_linear
from foretoken.quant.arrange import change_rows, for_kernels
from foretoken.quant.rounding import round_weights
from foretoken.quant.triton_layer import TritonLinear, runs_triton
from foretoken.quant.weights import IntWeights, Scheme

_PIECE = 1 << 20


def quantized_linear(
    weights: IntWeights,
    dtype: torch.dtype,
    *,
    probe: RowProbe | None,
    bias_N: Tensor | None = None,
    adds_residual: bool = False,
    wide: bool = False,
) -> Linear:
    """The layer of these weights for rows of `dtype`; the rest as for `make_linear`."""
    library = find_library()
    fitting = for_kernels(weights)
    device, out_dtype = weights.values_NK.device, torch.float32 if wide else None
    if fitting is not None and runs_triton(device, dtype):
        return TritonLinear(fitting, dtype=dtype, out_dtype=out_dtype, bias_N=bias_N)
    if library is None or fitting is None or device.type != "cpu" or dtype not in TYPES:
        return make_linear(
            weights.dequantized(dtype),
            probe=probe,
            bias_N=bias_N,
            adds_residual=adds_residual,
            wide=wide,
        )
    library.use_threads(torch.get_num_threads())
    rows = _rows_of_a_piece(weights.shape[1])
    ends = range(0, weights.shape[0], rows)
    pieces = (_pack(library, _rows(fitting, at, at + rows)) for at in ends)
    return KernelLinear(
        library,
        stack_packed(library, pieces, weights.shape[0]),
        dtype=dtype,
        out_dtype=out_dtype,
        bias_N=bias_N,
    )


def rounded_linear(
    weight_NK: Tensor,
    scheme: Scheme,
    *,
    probe: RowProbe | None,
    bias_N: Tensor | None = None,
    adds_residual: bool = False,
    wide: bool = False,
) -> Linear:
    """Round and pack a matrix, in pieces of rows: no second copy of a large one is ever there."""
    library, dtype = find_library(), weight_NK.dtype
    rows = _rows_of_a_piece(weight_NK.shape[1])
    if library is None or weight_NK.device.type != "cpu" or dtype not in TYPES:
        return quantized_linear(
            round_weights(weight_NK, scheme),
            dtype,
            probe=probe,
            bias_N=bias_N,
            adds_residual=adds_residual,
            wide=wide,
        )
    library.use_threads(torch.get_num_threads())
    pieces = (_pack(library, round_weights(piece, scheme)) for piece in weight_NK.split(rows))
    return KernelLinear(
        library,
        stack_packed(library, pieces, weight_NK.shape[0]),
        dtype=dtype,
        out_dtype=torch.float32 if wide else None,
        bias_N=bias_N,
    )


def _rows_of_a_piece(inputs: int) -> int:
    """Whole panels, a few million weights."""
    return max(1, _PIECE // inputs // PANEL) * PANEL


def _rows(weights: IntWeights, start: int, stop: int) -> IntWeights:
    part = change_rows(weights, lambda rows: rows[start:stop])
    assert isinstance(part, IntWeights), type(part)
    return part


def _pack(library: Library, weights: IntWeights) -> Packed:
    if weights.bits == 8:
        return pack_int8(library, weights.values_NK, weights.scale_NG)
    return pack_int4(library, weights.values_NK, weights.scale_NG, weights.zero_NG)
