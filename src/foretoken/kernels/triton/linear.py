"""Triton kernels of linear layers over integer weights, and the layout that they read.

Owns device code and its launch, no choice: `kernels.triton.found` says where it may be used.
Importing it imports triton. Blocks along K, tile sizes and warps never depend on the number of
rows, so a row's sums are made in the same order in any batch. Right on a GPU, and slow: tiles of
16 rows by 64 outputs are too few blocks for one.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from foretoken.kernels.group_numbers import in_few_bits

TILE_ROWS: Final = 16
TILE_OUTPUTS: Final = 64
BLOCK: Final = 64
"""Inputs of a step where no group says how many."""
_PADDING: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuPacked:
    """Integer weights [N, K], outputs side by side and padded to a multiple of 16."""

    values_KN: Tensor
    """int8 [K, N padded]; 4 bits: uint8 [K / 2, N padded], a group's first half in the low bits."""
    scale_GN: Tensor
    """[groups, N padded]; of groups float16, if that holds all scales and zero points."""
    zero_GN: Tensor | None
    """Of the scale's type, 4 bits only; None: 8."""
    bits: int
    outputs: int
    inputs: int
    group: int
    """Inputs that share a scale; 0: all of them."""

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that is read for a row."""
        parts = (self.values_KN, self.scale_GN, self.zero_GN)
        return sum(part.nbytes for part in parts if part is not None)


def pack_for_gpu(
    values_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, *, bits: int
) -> GpuPacked:
    """Lay out integers on their device.

    Args:
        values_NK: int8; 4 bits: uint8 below 16.
        scale_NG: float32; G = 1 with 8 bits: per output, else groups of 32, 64 or 128 inputs.
        zero_NG: float32, 4 bits only; None: 8.
        bits: 4 or 8.
    """
    outputs, inputs = values_NK.shape
    groups = scale_NG.shape[1]
    group = 0 if groups == 1 and bits == 8 else inputs // groups
    assert group in (0, 32, 64, 128) and group * groups in (0, inputs), (group, inputs)
    if bits == 4:
        low, high = values_NK.unflatten(1, (groups, 2, group // 2)).unbind(2)
        values_NK = (low | high << 4).flatten(1)
    if group:
        scale_NG, zero_NG = in_few_bits(scale_NG, zero_NG)
    return GpuPacked(
        values_KN=_turned(values_NK),
        scale_GN=_turned(scale_NG),
        zero_GN=None if zero_NG is None else _turned(zero_NG),
        bits=bits,
        outputs=outputs,
        inputs=inputs,
        group=group,
    )


def _turned(rows_NX: Tensor) -> Tensor:
    """[N, X] -> [X, N padded]."""
    return F.pad(rows_NX, (0, 0, 0, -rows_NX.shape[0] % _PADDING)).T.contiguous()


def run_linear(
    packed: GpuPacked,
    x_TK: Tensor,
    *,
    out_dtype: torch.dtype,
    bias_N: Tensor | None = None,
    residual_TN: Tensor | None = None,
) -> Tensor:
    """x W^T + bias + residual, float32 sums rounded once; rows may be strided."""
    rows, outputs = x_TK.shape[0], packed.outputs
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    y_TN = x_TK.new_empty((rows, outputs), dtype=out_dtype)
    if residual_TN is not None and residual_TN.stride(1) != 1:
        residual_TN = residual_TN.contiguous()
    grid = (triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE_OUTPUTS))
    if not rows:
        return y_TN
    _linear[grid](
        x_TK, packed.values_KN, packed.scale_GN, packed.zero_GN, bias_N, residual_TN, y_TN,
        rows, outputs, packed.inputs, packed.values_KN.stride(0), x_TK.stride(0),
        0 if residual_TN is None else residual_TN.stride(0),
        BITS=packed.bits, GROUP=packed.group, STEP=packed.group or BLOCK, TILE_M=TILE_ROWS,
        TILE_N=TILE_OUTPUTS, WIDENS=_widens(x_TK.dtype), num_warps=4, num_stages=3,
    )  # fmt: skip
    return y_TN


def _widens(dtype: torch.dtype) -> bool:
    """Whether products need float32 operands: Triton's interpreter has none of bfloat16."""
    return dtype == torch.bfloat16 and not isinstance(_linear, triton.JITFunction)


@triton.jit(do_not_specialize=["rows", "x_stride", "residual_stride"])
def _linear(
    x, values, scale, zero, bias, residual, y, rows, outputs, inputs, padded, x_stride,
    residual_stride,
    BITS: tl.constexpr, GROUP: tl.constexpr, STEP: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, WIDENS: tl.constexpr,
):  # fmt: skip
    """One tile of y: all of K in steps, in order."""
    m = (tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)).to(tl.int64)[:, None]
    n = (tl.program_id(1) * TILE_N + tl.arange(0, TILE_N))[None, :]
    n_there = n < padded
    x_rows = x + m * x_stride
    kind: tl.constexpr = tl.float32 if WIDENS else x.dtype.element_ty
    total = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in range(0, inputs, STEP):
        at = tl.full((1, 1), 0, tl.int64) + start
        if BITS == 4:
            cells = values + at // 2 * padded + n
            part = _four_bits(x_rows + at, m < rows, cells, n_there, padded, kind, STEP)
        else:
            cells = values + at * padded + n
            left = inputs - start
            part = _eight_bits(x_rows + at, m < rows, cells, n_there, padded, left, kind, STEP)
        if GROUP:
            of_group = at // STEP * padded + n
            if zero is not None:
                offset = 8.0 - tl.load(zero + of_group, mask=n_there, other=8.0).to(tl.float32)
                part += offset * _sums(x_rows + at, m < rows, kind, STEP, TILE_N)
            part *= tl.load(scale + of_group, mask=n_there, other=0.0).to(tl.float32)
        total += part
    if not GROUP:
        total *= tl.load(scale + n, mask=n_there, other=0.0)
    there = (m < rows) & (n < outputs)
    if bias is not None:
        total += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    if residual is not None:
        more = tl.load(residual + m * residual_stride + n, mask=there, other=0.0)
        total += more.to(tl.float32)
    tl.store(y + m * outputs + n, total.to(y.dtype.element_ty), mask=there)


@triton.jit
def _eight_bits(x, m_there, cells, n_there, padded, left, kind: tl.constexpr, STEP: tl.constexpr):
    """The products of a step; what lies beyond the inputs that are left is 0."""
    k = tl.arange(0, STEP)
    rows = tl.load(x + k[None, :], mask=m_there & (k[None, :] < left), other=0.0)
    there = n_there & (k[:, None] < left)
    whole = tl.load(cells + k.to(tl.int64)[:, None] * padded, mask=there, other=0)
    return tl.dot(rows.to(kind), whole.to(kind), input_precision="ieee")


@triton.jit
def _four_bits(x, m_there, cells, n_there, padded, kind: tl.constexpr, STEP: tl.constexpr):
    """The products of a group with values less 8: its first half, then its second."""
    half = tl.arange(0, STEP // 2)
    both = tl.load(cells + half.to(tl.int64)[:, None] * padded, mask=n_there, other=0)
    first = tl.load(x + half[None, :], mask=m_there, other=0.0)
    second = tl.load(x + STEP // 2 + half[None, :], mask=m_there, other=0.0)
    low = ((both & 15).to(tl.int8) - 8).to(kind)
    high = ((both >> 4).to(tl.int8) - 8).to(kind)
    part = tl.dot(first.to(kind), low, input_precision="ieee")
    return tl.dot(second.to(kind), high, part, input_precision="ieee")


@triton.jit
def _sums(x, m_there, kind: tl.constexpr, STEP: tl.constexpr, TILE_N: tl.constexpr):
    """Sums of each row's inputs of a group, in every column; made as products, which have a fixed
    order."""
    rows = tl.load(x + tl.arange(0, STEP)[None, :], mask=m_there, other=0.0)
    ones = tl.full((STEP, TILE_N), 1.0, kind)
    return tl.dot(rows.to(kind), ones, input_precision="ieee")
