"""AWQ checkpoints, GEMM layout: `qweight` and `qzeros` packed along outputs in an order of eight.

Layout as AutoAWQ writes it; method: Lin et al. 2023 (arXiv 2306.00978).
"""

from typing import final

from foretoken.quant.arrange import Weights
from foretoken.quant.formats.base import Format, RawTensors, check_shape, group_size
from foretoken.quant.formats.unpacking import unpack, weights_of


@final
class AwqFormat(Format):
    """4 bits in groups with zero points."""

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        scales = tensors.raw(f"{module}.scales")
        groups, outputs = scales.shape
        group_size(module, inputs, groups)
        words = check_shape(module, tensors.raw(f"{module}.qweight"), (inputs, -(-outputs // 8)))
        values = unpack(words, 4, awq=True)[:, :outputs]
        zeros = None
        if tensors.has(f"{module}.qzeros"):
            packed = (groups, -(-outputs // 8))
            stored = check_shape(module, tensors.raw(f"{module}.qzeros"), packed)
            zeros = unpack(stored, 4, awq=True)[:, :outputs].T.contiguous()
        return weights_of(values.T.contiguous(), scales.T.contiguous(), zeros, 4)
