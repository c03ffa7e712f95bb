"""Linear layers on the GPU's kernels: floats and integers, K in segments of the shape's length.

Whoever runs whole layers reads `weights` and adds the parts where it needs them; called by itself
the layer adds them. A row's bits are its own by the order of the parts.
"""

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import GpuKernels, GpuWeights
from foretoken.kernels.group_numbers import in_few_bits
from foretoken.ops.linear.base import Linear


def pack_for_gpu(
    kernels: GpuKernels,
    values_NK: Tensor,
    groups: tuple[Tensor, Tensor | None] | None = None,
    *,
    bits: int = 0,
    in_one: bool = False,
    of_outputs: int = 0,
) -> GpuWeights:
    """Weights as kernels read them, on their device.

    Args:
        kernels: say how long a segment is.
        values_NK: floats, or integers as `quant.IntWeights` has them.
        groups: scales and zero points of integers, in groups that kernels have
            (`quant.arrange.for_kernels`).
        bits: of integers; 0: floats.
        in_one: one segment, of heads and of what is gated.
        of_outputs: outputs of the matrix that these are some of; 0: all.
    """
    outputs, inputs = values_NK.shape
    segment = inputs if in_one else kernels.segment_of(of_outputs or outputs, inputs, bits)
    if groups is None:
        return GpuWeights(values_NK=values_NK.contiguous(), segment=segment, inputs=inputs)
    scale_NG, zero_NG = groups
    if bits == 4:
        count = scale_NG.shape[1]
        low, high = values_NK.unflatten(1, (count, 2, inputs // count // 2)).unbind(2)
        values_NK = (low | high << 4).flatten(1)
    if 1 < scale_NG.shape[1] and inputs // scale_NG.shape[1] < 128:
        scale_NG, zero_NG = in_few_bits(scale_NG, zero_NG)
    return GpuWeights(
        values_NK=values_NK.contiguous(),
        segment=segment,
        inputs=inputs,
        scale_NG=scale_NG.contiguous(),
        zero_NG=None if zero_NG is None else zero_NG.contiguous(),
        bits=bits,
    )


class GpuLinear(Linear, ABC):
    """y = x W^T + bias + residual, float32 sums rounded once."""

    def __init__(
        self,
        kernels: GpuKernels,
        weights: GpuWeights,
        *,
        out_dtype: torch.dtype | None = None,
        bias_N: Tensor | None = None,
    ) -> None:
        """Bind packed weights; results are in `out_dtype`, by default that of rows."""
        self.kernels, self.weights = kernels, weights
        self.bias_N, self.out_dtype = bias_N, out_dtype

    @property
    def kept(self) -> str:
        """The type of the weights and their groups, in words."""
        weights = self.weights
        if not weights.bits:
            return str(weights.values_NK.dtype).removeprefix("torch.")
        return f"int{weights.bits}" + f" in groups of {weights.group}" * bool(weights.group)

    def over(self, other: "GpuLinear") -> "GpuLinear":
        """Outputs of both, of floats, without a bias."""
        values_NK = torch.cat([self.weights.values_NK, other.weights.values_NK])
        packed = pack_for_gpu(self.kernels, values_NK)
        return WholeLinear(self.kernels, packed, out_dtype=self.out_dtype)

    @property
    def outputs(self) -> int:
        """Of `run`."""
        return self.weights.outputs

    @property
    def segments(self) -> int:
        """How many sums each output has."""
        return self.weights.segments

    @property
    def most_parts(self) -> int:
        """Rows times parts of a call never exceed the larger of its rows and this."""
        return self.segments * self.kernels.few_rows if self.segments > 1 else 1

    def num_parts(self, rows: int) -> int:
        """Parts that `run` makes of so many rows."""
        return self.segments if rows <= self.kernels.few_rows else 1

    @abstractmethod
    def run(self, x_TK: Tensor, parts_PTN: Tensor) -> None:
        """float32 parts of x W^T, `num_parts` of them."""

    def run_own(self, x_TK: Tensor, parts_PTN: Tensor) -> None:
        """Parts of the weights that this device has."""
        if x_TK.shape[0] <= self.kernels.few_rows:
            self.kernels.linear_splits(x_TK, self.weights, parts_PTN)
        else:
            self.kernels.linear_long(x_TK, self.weights, parts_PTN)

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Two kernels; rows may be strided."""
        rows, outputs = x_TK.shape[0], self.outputs
        y_TN = x_TK.new_empty(rows, outputs, dtype=self.out_dtype or x_TK.dtype)
        if rows:
            x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
            parts_PTN = x_TK.new_empty(self.num_parts(rows), rows, outputs, dtype=torch.float32)
            self.run(x_TK, parts_PTN)
            self.kernels.add_parts(parts_PTN, self.bias_N, residual_TN, y_TN)
        return y_TN


@final
class WholeLinear(GpuLinear):
    """All of a matrix lies on one device."""

    def run(self, x_TK: Tensor, parts_PTN: Tensor) -> None:
        """As its weights give them."""
        self.run_own(x_TK, parts_PTN)
