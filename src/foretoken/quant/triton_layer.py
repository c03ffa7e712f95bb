"""Linear layers over integer weights on a GPU. Knows the layer's interface, not the device code.

`kernels.triton.linear` is imported when the first layer is made, since that imports triton.
"""

import importlib
from typing import Any, final

import torch
from torch import Tensor

from foretoken.ops.linear import Linear
from foretoken.quant.weights import IntWeights

TRITON_TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of rows that the kernels take."""


@final
class TritonLinear(Linear):
    """y = x W^T + bias + residual, float32 sums rounded once; a row's bits are its own."""

    def __init__(
        self,
        weights: IntWeights,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        bias_N: Tensor | None = None,
    ) -> None:
        """Lay out weights on their device.

        Args:
            weights: of groups that kernels have (`for_kernels`).
            dtype: of rows: float32, bfloat16 or float16.
            out_dtype: of results and residuals; default: that of rows.
            bias_N: added before the residual.
        """
        self._kernels: Any = importlib.import_module("foretoken.kernels.triton.linear")
        self.dtype, self.out_dtype = dtype, out_dtype or dtype
        self.packed: Any = self._kernels.pack_for_gpu(
            weights.values_NK, weights.scale_NG, weights.zero_NG, bits=weights.bits
        )
        self._bias_N = bias_N

    @property
    def kept(self) -> str:
        group = self.packed.group
        return f"int{self.packed.bits}" + f" in groups of {group}" * bool(group)

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """One kernel; rows may be strided."""
        packed = self.packed
        assert x_TK.dtype == self.dtype, (x_TK.dtype, self.dtype)
        assert x_TK.shape[1] == packed.inputs, (x_TK.shape, packed.inputs)
        expected = (x_TK.shape[0], packed.outputs)
        assert residual_TN is None or residual_TN.shape == expected, (residual_TN, expected)
        y_TN: Tensor = self._kernels.run_linear(
            packed,
            x_TK,
            out_dtype=self.out_dtype,
            bias_N=self._bias_N,
            residual_TN=residual_TN,
        )
        return y_TN
