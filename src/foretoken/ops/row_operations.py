"""What is done to each row between the matrices, compiled: norms, rotary positions, gates.

One call into C each, computed in float32 and rounded once; a row's bits depend on the row alone
(native/rows.h). The twins are PyTorch's operations in `layers` and `ops.activation`; whoever calls
these asks `Backend.rows` first, which is None where a tensor is not theirs.
"""

import ctypes
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtGateCall, FtNormCall, FtRotaryCall
from foretoken.shape.memory_formula import KV_SCALE_BYTES

STORED_TYPES = {**TYPES, torch.int8: 2}
_PTR = ctypes.c_void_p


class TurnNorms(NamedTuple):
    """Norms over heads."""

    query_h: Tensor
    key_h: Tensor
    value_h: Tensor | None
    eps: float
    after_turning: bool
    """Whether queries and keys are turned first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """How the fused rows [T, (H + 2 K) * h] of a step are turned and where they are kept."""

    num_heads: int
    num_kv_heads: int
    cos_TW: Tensor
    """[T, 1, W], of each token; W dimensions of a head are turned."""
    sin_TW: Tensor
    slots_T: Tensor | slice
    norms: TurnNorms | None


@final
class RowKernels:
    """The calls; tensors lie on the CPU in a type of TYPES, their last dimension dense."""

    def __init__(self, library: Library) -> None:
        self._norm = library.function("ft_norm", (_PTR,))
        self._rotary = library.function("ft_rotary", (_PTR,))
        self._gate = library.function("ft_gate", (_PTR,))

    def norm(
        self, x_TD: Tensor, weight_D: Tensor, eps: float, residual_TD: Tensor | None = None
    ) -> Tensor:
        """x / rms(x) * weight, then the sum with the residual; [T, D], rows may be strided."""
        y_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype)
        width = x_TD.shape[1]
        call = FtNormCall(
            x=x_TD.data_ptr(),
            y=y_TD.data_ptr(),
            residual=None if residual_TD is None else residual_TD.data_ptr(),
            weight=weight_D.data_ptr(),
            rows=x_TD.shape[0],
            width=width,
            x_stride=x_TD.stride(0),
            y_stride=width,
            residual_stride=0 if residual_TD is None else residual_TD.stride(0),
            type=TYPES[x_TD.dtype],
            weight_type=TYPES[weight_D.dtype],
            eps=eps,
        )
        self._norm(ctypes.addressof(call))
        return y_TD

    def turn_and_write(self, qkv_TA: Tensor, layer_SKh: Tensor, turn: Turn) -> None:
        """Norm and turn queries and keys in place, and store keys and values, in int8 if the store
        is of that type."""
        size = layer_SKh.shape[2] - (KV_SCALE_BYTES if layer_SKh.dtype == torch.int8 else 0)
        first, slots = turn.slots_T, None
        if isinstance(first, Tensor):
            slots, start = first.data_ptr(), 0
        else:
            start = first.start
        call = FtRotaryCall(
            qkv=qkv_TA.data_ptr(),
            kv=layer_SKh.data_ptr(),
            cos=turn.cos_TW.data_ptr(),
            sin=turn.sin_TW.data_ptr(),
            slots=slots,
            first_slot=start,
            rows=qkv_TA.shape[0],
            qkv_stride=qkv_TA.stride(0),
            kv_stride=layer_SKh.stride(0),
            num_heads=turn.num_heads,
            num_kv_heads=turn.num_kv_heads,
            head_dim=size,
            width=turn.cos_TW.shape[-1],
            type=TYPES[qkv_TA.dtype],
            kv_type=STORED_TYPES[layer_SKh.dtype],
        )
        if turn.norms is not None:
            query_h, key_h, value_h, call.eps, call.turns_first = turn.norms
            call.query_norm, call.key_norm = query_h.data_ptr(), key_h.data_ptr()
            call.value_norm = None if value_h is None else value_h.data_ptr()
            call.norm_type = TYPES[query_h.dtype]
        self._rotary(ctypes.addressof(call))

    def gate(self, both_TF: Tensor, activation: int) -> Tensor:
        """act(gate) * up of rows [T, 2 F] that hold gate, then up."""
        rows, width = both_TF.shape[0], both_TF.shape[1] // 2
        y_TF = torch.empty((rows, width), dtype=both_TF.dtype)
        call = FtGateCall(
            x=both_TF.data_ptr(),
            y=y_TF.data_ptr(),
            rows=rows,
            width=width,
            x_stride=both_TF.stride(0),
            y_stride=width,
            type=TYPES[both_TF.dtype],
            activation=activation,
        )
        self._gate(ctypes.addressof(call))
        return y_TF
