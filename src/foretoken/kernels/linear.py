"""Weights as the C kernels of linear layers want them, and the call itself.

`native/linear.h` says what is computed and in which order; this module owns the layouts in
memory. Nothing here knows models. Packed tensors live as long as their `PackedLayer`.
"""

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.block_types import BlockRows, pack_blocks
from foretoken.kernels.group_numbers import in_few_bits
from foretoken.kernels.library import Library
from foretoken.kernels.structures import FtLinear, FtLinearRows, FtPanelRows
from foretoken.shape.block_kinds import BLOCK_KINDS

PANEL: Final = 16
FLOAT32, BFLOAT16, INT8, INT4, BLOCKS = range(5)
TYPES: Final = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}
_HUGE: Final = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Packed weights [N, K] of one type; `outputs` and `inputs` are without padding."""

    weight_type: int
    weight: Tensor
    outputs: int
    inputs: int
    gated: bool = False
    group: int = 0
    scale: Tensor | None = None
    """Of int8 float32 [N padded]; in groups [panels, groups, 16], float16 if that holds all scales
    and zero points exactly, else float32."""
    zero: Tensor | None = None
    """Like the scale, in steps of the weights; None: the middle, 8 or 128."""
    x_bits: int = 16
    """Of activations in fixed point, which integers are multiplied with: 16 or 8."""
    kind: str = ""
    """Of blocks their type; weight, scale and zero are then what `block_types.PackedBlocks` calls
    values, numbers and upper."""
    unit: int = 0
    """Of blocks: inputs that share upper numbers."""

    @property
    def num_bytes(self) -> int:
        """Bytes of everything that is read for a row."""
        parts = (self.weight, self.scale, self.zero)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def halves(self) -> bool:
        """Whether scales and zero points are float16."""
        return self.scale is not None and self.scale.dtype == torch.float16


def interleave_panels(rows_NX: Tensor) -> Tensor:
    """Gate rows over up rows, as panels of 16 that alternate: [2F, X] -> [2 * padded F, X]."""
    padded = [_pad_rows(half).unflatten(0, (-1, PANEL)) for half in rows_NX.chunk(2)]
    mixed: Tensor = torch.stack(padded, dim=1).flatten(0, 2)
    return mixed


def _pad_rows(rows_NX: Tensor) -> Tensor:
    missing = -rows_NX.shape[0] % PANEL
    return F.pad(rows_NX, (0, 0, 0, missing)) if missing else rows_NX


def _in_panels(rows_NX: Tensor, *, gated: bool) -> Tensor:
    """Padded to whole panels: [panels, 16, X]."""
    rows = interleave_panels(rows_NX) if gated else _pad_rows(rows_NX)
    panels: Tensor = rows.unflatten(0, (-1, PANEL))
    return panels


def _by_panels(numbers_NG: Tensor, *, gated: bool) -> Tensor:
    """Numbers of outputs or groups, [panels, groups, 16]."""
    return _in_panels(numbers_NG, gated=gated).transpose(1, 2).contiguous()


def empty_packed(library: Library, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for packed weights, in huge pages where it is large."""
    memory = torch.empty(shape, dtype=dtype)
    if memory.nbytes >= _HUGE:
        library.advise_huge(memory.data_ptr(), memory.nbytes)
    return memory


def _pack_rows(
    library: Library,
    rows_NK: Tensor,
    multiple: int,
    *,
    gated: bool,
    flip: int = 0,
    halves: bool = False,
) -> Tensor:
    """Rows in panels, int32 [panels, units, 16], in all threads of the kernels.

    Args:
        library: the kernels.
        rows_NK: of 4 bytes, 2 or 1.
        multiple: of inputs, to which zeros are added.
        gated: gate rows over up rows.
        flip: what each unit is XORed with.
        halves: whether only the low halves of bytes are kept, eight in a unit.
    """
    missing = -rows_NK.shape[1] % multiple
    rows = interleave_panels(rows_NK) if gated else rows_NK
    rows = F.pad(rows, (0, missing)) if missing else rows
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    outputs, row_bytes = rows.shape[0], rows.shape[1] * rows.element_size()
    units = row_bytes // (8 if halves else 4)
    packed = empty_packed(library, (-(-outputs // PANEL), units, PANEL), torch.int32)
    call = FtPanelRows(
        rows=rows.data_ptr(),
        packed=packed.data_ptr(),
        outputs=outputs,
        units=units,
        row_bytes=rows.stride(0) * rows.element_size(),
        flip=flip,
        halves=halves,
    )
    library.function("ft_pack_rows", (ctypes.c_void_p,))(ctypes.addressof(call))
    return packed


def pack_float(library: Library, weight_NK: Tensor, *, gated: bool = False) -> Packed:
    """Pack float32 or bfloat16 weights."""
    outputs, inputs = weight_NK.shape
    multiple = 32 if weight_NK.dtype == torch.bfloat16 else 1
    packed = _pack_rows(library, weight_NK, multiple, gated=gated)
    return Packed(
        weight_type=TYPES[weight_NK.dtype],
        weight=packed.view(weight_NK.dtype) if weight_NK.dtype == torch.float32 else packed,
        outputs=outputs,
        inputs=inputs,
        gated=gated,
    )


def pack_int8(
    library: Library, values_NK: Tensor, scale_NG: Tensor, *, gated: bool = False
) -> Packed:
    """Pack int8 weights: value * scale, per output or per group of 32, 64 or 128 inputs.

    Args:
        library: where they will be used.
        values_NK: int8.
        scale_NG: float32, G columns: 1, or K / group.
        gated: gate rows over up rows.
    """
    outputs, inputs = values_NK.shape
    group = 0 if scale_NG.shape[1] == 1 else -(-inputs // scale_NG.shape[1])
    packed = _pack_rows(library, values_NK, group or 32, gated=gated, flip=0x80808080)
    numbers_NG = in_few_bits(scale_NG, None).scale if group else scale_NG.float()
    return Packed(
        weight_type=INT8,
        weight=packed,
        outputs=outputs,
        inputs=inputs,
        gated=gated,
        group=group,
        scale=_by_panels(numbers_NG, gated=gated),
    )


def pack_int4(
    library: Library,
    values_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None = None,
    *,
    gated: bool = False,
) -> Packed:
    """Pack 4-bit weights: (value - zero) * scale per group of 32, 64 or 128 inputs.

    Args:
        library: where they will be used.
        values_NK: uint8, 0 to 15; K a multiple of the group.
        scale_NG: float32, K / group columns.
        zero_NG: float32, in steps of the values; None: 8.
        gated: gate rows over up rows.
    """
    outputs, inputs = values_NK.shape
    group = inputs // scale_NG.shape[1]
    assert group in (32, 64, 128) and inputs % group == 0, (group, inputs)
    packed = _pack_rows(library, values_NK, group, gated=gated, halves=True)
    numbers = in_few_bits(scale_NG, zero_NG)
    return Packed(
        weight_type=INT4,
        weight=packed,
        outputs=outputs,
        inputs=inputs,
        gated=gated,
        group=group,
        scale=_by_panels(numbers.scale, gated=gated),
        zero=None if numbers.zero is None else _by_panels(numbers.zero, gated=gated),
    )


def pack_block_rows(library: Library, rows: BlockRows) -> Packed:
    """Pack blocks as they are."""
    found = pack_blocks(library, rows)
    return Packed(
        weight_type=BLOCKS,
        weight=found.values,
        outputs=rows.addresses_N.numel(),
        inputs=rows.inputs,
        group=BLOCK_KINDS[rows.kind].group,
        scale=found.numbers,
        zero=found.upper,
        kind=rows.kind,
        unit=found.unit,
    )


def stack_packed(library: Library, pieces: Iterable[Packed], outputs: int) -> Packed:
    """Packed matrices over each other, each copied into its place as it comes.

    Args:
        library: where they will be used.
        pieces: of one kind, not gated, all but the last of whole panels.
        outputs: of all together.
    """
    parts: dict[str, Tensor] = {}
    at, last = 0, None
    for last in pieces:
        for name in ("weight", "scale", "zero"):
            part = getattr(last, name)
            if part is None:
                continue
            if name in parts and parts[name].dtype != part.dtype:
                # Scales or zero points of one piece need more bits than those of another.
                parts[name], part = parts[name].float(), part.float()
            if name not in parts:
                shape = (-(-outputs // PANEL), *part.shape[1:])
                parts[name] = empty_packed(library, shape, part.dtype)
            parts[name][at : at + part.shape[0]] = part
        at += last.weight.shape[0]
    assert last is not None and at == -(-outputs // PANEL), (at, outputs)
    return replace(
        last,
        outputs=outputs,
        weight=parts["weight"],
        scale=parts.get("scale"),
        zero=parts.get("zero"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayer:
    """A layer bound to its C function; what its struct points to is kept here."""

    packed: Packed
    struct: FtLinear
    kept: tuple[Tensor | None, ...]
    dense: Callable[[int, int, int, int | None, int], None]
    """ft_linear_dense(layer, x, y, residual, rows)."""
    strided: Callable[[int, Any], None]
    """ft_linear_run(layer, rows)."""

    @classmethod
    def bind(
        cls,
        library: Library,
        packed: Packed,
        *,
        x_dtype: torch.dtype,
        y_dtype: torch.dtype,
        bias_N: Tensor | None = None,
        norm: tuple[Tensor, float] | None = None,
    ) -> "PackedLayer":
        """Fill the struct.

        Args:
            library: the kernels.
            packed: the weights.
            x_dtype: float32 or bfloat16, of the rows given.
            y_dtype: float32 or bfloat16, of the result and the residual.
            bias_N: added to the sums.
            norm: weights [K] and eps of an RMSNorm over the rows before.
        """
        bias = None
        if bias_N is not None:
            columns = _in_panels(bias_N.float()[:, None], gated=packed.gated)
            bias = columns.flatten().contiguous()
        norm_K = norm[0].float().contiguous() if norm is not None else None
        block = BLOCK_KINDS.get(packed.kind)

        def address(tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensor.data_ptr()

        struct = FtLinear(
            weight_type=packed.weight_type,
            x_type=TYPES[x_dtype],
            y_type=TYPES[y_dtype],
            gated=packed.gated,
            group=packed.group,
            x_bits=packed.x_bits,
            halves=packed.halves,
            front=0 if block is None else block.front,
            form=0 if block is None else block.form,
            unit=packed.unit,
            norm_eps=norm[1] if norm is not None else 0.0,
            outputs=packed.outputs,
            inputs=packed.inputs,
            weight=address(packed.weight),
            scale=address(packed.scale),
            zero=address(packed.zero),
            bias=address(bias),
            norm=address(norm_K),
        )
        pointer = ctypes.c_void_p
        return cls(
            packed=packed,
            struct=struct,
            kept=(bias, norm_K),
            dense=library.function("ft_linear_dense", (pointer,) * 4 + (ctypes.c_int64,)),
            strided=library.function("ft_linear_run", (pointer, ctypes.POINTER(FtLinearRows))),
        )
