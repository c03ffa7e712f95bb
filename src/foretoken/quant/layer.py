"""Linear layers over integer weights: the kernels' where there are any, else dequantized.

Without kernels, or where they have no such groups, the weights are dequantized once and stay in
the rows' type: the same model up to rounding, without the memory saved.
"""

import torch
from torch import Tensor

from foretoken.kernels.library import Library, find_library
from foretoken.kernels.linear import TYPES, Packed, pack_int4, pack_int8
from foretoken.ops.linear import KernelLinear, Linear, RowProbe, make_linear
from foretoken.quant.arrange import for_kernels
from foretoken.quant.weights import IntWeights


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
    on_cpu = weights.values_NK.device.type == "cpu"
    if library is None or fitting is None or not on_cpu or dtype not in TYPES:
        return make_linear(
            weights.dequantized(dtype),
            probe=probe,
            bias_N=bias_N,
            adds_residual=adds_residual,
            wide=wide,
        )
    library.use_threads(torch.get_num_threads())
    return KernelLinear(
        library,
        _pack(library, fitting),
        dtype=dtype,
        out_dtype=torch.float32 if wide else None,
        bias_N=bias_N,
    )


def _pack(library: Library, weights: IntWeights) -> Packed:
    if weights.bits == 8:
        return pack_int8(library, weights.values_NK, weights.scale_NG)
    return pack_int4(library, weights.values_NK, weights.scale_NG, weights.zero_NG)
