"""Linear layers on the compiled kernels: every row's bits are its own by construction.

One class for all types of weights; which of them exist is `kernels.linear`'s and `quant`'s
affair. `PlainLinear` on the same weights is the twin (integer weights: `quant`'s).
"""

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import final

import torch
from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.linear import (
    BFLOAT16,
    BLOCKS,
    FLOAT32,
    INT4,
    INT8,
    Packed,
    PackedLayer,
)
from foretoken.kernels.structures import FtLinearRows
from foretoken.ops.linear.base import Linear

_KEPT = {FLOAT32: "float32", BFLOAT16: "bfloat16", INT8: "int8", INT4: "int4"}


@final
class KernelLinear(Linear):
    """y = act(norm(x) W^T + bias) + residual, float32 sums rounded once."""

    def __init__(
        self,
        library: Library,
        packed: Packed,
        *,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        bias_N: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> None:
        """Bind packed weights.

        Args:
            library: the kernels.
            packed: the weights; gated ones give silu(gate) * up.
            dtype: float32 or bfloat16, of rows.
            out_dtype: of results and residuals; default: that of rows.
            bias_N: added before the activation.
            norm: weights [K] and eps of an RMSNorm over the rows before.
        """
        self.library = library
        self.dtype, self.out_dtype = dtype, out_dtype or dtype
        self.packed, self.bias_N = packed, bias_N
        self.columns = packed.outputs // 2 if packed.gated else packed.outputs
        self._layer = PackedLayer.bind(
            library,
            packed,
            x_dtype=dtype,
            y_dtype=self.out_dtype,
            bias_N=bias_N,
            norm=norm,
        )
        self._struct = ctypes.addressof(self._layer.struct)
        self._dense, self._strided = self._layer.dense, self._layer.strided
        self._beside: tuple[KernelLinear, ...] = ()

    def join(self, others: Sequence["KernelLinear"]) -> None:
        """Have the results of `others` beside this layer's own, in the same calls; they are not to
        be called by themselves any more."""
        assert not self._beside, "joined once"
        for one in others:
            assert one.packed.inputs == self.packed.inputs, (one.packed.inputs, self.packed.inputs)
            assert (one.dtype, one.out_dtype) == (self.dtype, self.out_dtype), one.dtype
            self.columns += one.columns
        self._beside = tuple(others)
        for before, after in pairwise((self, *others)):
            before._layer.struct.next = after.address

    @property
    def parts(self) -> tuple["KernelLinear", ...]:
        """This layer and those beside it."""
        return (self, *self._beside)

    @property
    def kept(self) -> str:
        """The type of the weights and their groups, in words."""
        group = self.packed.group
        if self.packed.kind:
            return f"{self.packed.kind} in the file's bits"
        return _KEPT[self.packed.weight_type] + f" in groups of {group}" * bool(group)

    @property
    def fixed_bits(self) -> int:
        """Bits of rows before integer weights; floats are not rounded."""
        return self.packed.x_bits if self.packed.weight_type in (INT8, INT4, BLOCKS) else 0

    @property
    def address(self) -> int:
        """Address of its ft_linear, for kernels that run several layers.

        Valid while this object lives."""
        return self._struct

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """One call into C; rows may be strided."""
        assert x_TK.dtype == self.dtype, (x_TK.dtype, self.dtype)
        assert x_TK.shape[1] == self.packed.inputs, (x_TK.shape, self.packed.inputs)
        rows = x_TK.shape[0]
        y_TN = x_TK.new_empty((rows, self.columns), dtype=self.out_dtype)
        if residual_TN is None:
            residual, dense = None, True
        else:
            assert residual_TN.shape == y_TN.shape, (residual_TN.shape, y_TN.shape)
            assert residual_TN.dtype == self.out_dtype, (residual_TN.dtype, self.out_dtype)
            residual, dense = residual_TN.data_ptr(), residual_TN.is_contiguous()
        if dense and x_TK.is_contiguous():
            self._dense(self._struct, x_TK.data_ptr(), y_TN.data_ptr(), residual, rows)
        else:
            self._run_strided(x_TK, y_TN, residual_TN)
        return y_TN

    def _run_strided(self, x_TK: Tensor, y_TN: Tensor, residual_TN: Tensor | None) -> None:
        x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
        if residual_TN is not None and residual_TN.stride(1) != 1:
            residual_TN = residual_TN.contiguous()
        rows = FtLinearRows(
            x=x_TK.data_ptr(),
            y=y_TN.data_ptr(),
            residual=None if residual_TN is None else residual_TN.data_ptr(),
            rows=x_TK.shape[0],
            x_stride=x_TK.stride(0),
            y_stride=y_TN.stride(0),
            residual_stride=0 if residual_TN is None else residual_TN.stride(0),
        )
        self._strided(self._struct, ctypes.byref(rows))
