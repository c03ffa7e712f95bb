"""Packs matrices in the block types of GGUF files; `native/ggml.h` says how they lie.

Knows no files: rows are given by their addresses.
"""

import ctypes
import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.structures import FtGgmlMatrix
from foretoken.shape.block_kinds import BLOCK_KINDS, STEP

_PANEL: Final = 16
_LINE, _SMALL, _HUGE, _PIECE = 64, 64 << 10, 4 << 20, 32 << 20
_rest: list[Tensor] = []
"""What is left of the last piece of memory that small matrices share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRows:
    """Rows of blocks in memory, in the order in which they are wanted."""

    kind: str
    addresses_N: Tensor
    """int64."""
    kept: tuple[Tensor, ...]
    """What the addresses are in."""
    inputs: int
    columns: Tensor | None = None
    """int32: which `width` inputs come where; None: all as they are."""
    width: int = 0


class PackedBlocks(NamedTuple):
    """What `pack_blocks` makes, as `native/ggml.h` describes."""

    values: Tensor
    numbers: Tensor
    upper: Tensor
    unit: int


def pack_blocks(library: Library, rows: BlockRows) -> PackedBlocks:
    """Pack rows from where they lie, in all threads of the kernels."""
    kind, outputs = BLOCK_KINDS[rows.kind], rows.addresses_N.numel()
    panels, steps = -(-outputs // _PANEL), rows.inputs // STEP
    assert rows.inputs % kind.inputs == 0, (rows.inputs, kind.inputs)
    unit = kind.inputs if rows.columns is None else math.gcd(rows.width, kind.inputs)
    values = _empty(library, panels * steps * _PANEL * kind.step_bytes)
    numbers = _empty(library, panels * steps * _PANEL * kind.number_bytes)
    upper = _empty(library, panels * (rows.inputs // unit) * _PANEL * kind.upper_bytes)
    if outputs % _PANEL:
        for part in (values, numbers, upper):
            part.view(panels, -1)[-1].zero_()
    columns = rows.columns
    matrix = FtGgmlMatrix(
        rows=rows.addresses_N.data_ptr(),
        columns=None if columns is None else columns.data_ptr(),
        values=values.data_ptr(),
        numbers=numbers.data_ptr(),
        upper=upper.data_ptr(),
        outputs=outputs,
        inputs=rows.inputs,
        type=kind.number,
        width=rows.width,
        unit=unit,
    )
    pack = library.function("ft_pack_ggml", (ctypes.c_void_p,), ctypes.c_int)
    assert pack(ctypes.addressof(matrix)), f"{rows.kind} is not known to the kernels"
    return PackedBlocks(values, numbers, upper, unit)


def count_strange(library: Library, rows: BlockRows) -> int:
    """How many floats in the blocks of rows are NaN or infinite, in all threads of the kernels."""
    matrix = FtGgmlMatrix(
        rows=rows.addresses_N.data_ptr(),
        outputs=rows.addresses_N.numel(),
        inputs=rows.inputs,
        type=BLOCK_KINDS[rows.kind].number,
    )
    count = library.function("ft_strange_ggml", (ctypes.c_void_p,), ctypes.c_int64)
    found: int = count(ctypes.addressof(matrix))
    assert found >= 0, f"{rows.kind} is not known to the kernels"
    return found


@torch.inference_mode(False)
def _empty(library: Library, num_bytes: int) -> Tensor:
    """Memory in huge pages: of its own where it is large, else a part of a piece that those before
    and after it share, as the matrices of experts do. It is no tensor of inference, whoever asks:
    another model's weights may be a part of the same piece."""
    if num_bytes < _SMALL:
        return torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes >= _HUGE:
        return _huge(library, num_bytes)
    rest = _rest.pop() if _rest else torch.empty(0, dtype=torch.uint8)
    if len(rest) < num_bytes:
        rest = _huge(library, _PIECE)
    _rest.append(rest[-(-num_bytes // _LINE) * _LINE :])
    return rest[:num_bytes]


def _huge(library: Library, num_bytes: int) -> Tensor:
    memory = torch.empty(num_bytes, dtype=torch.uint8)
    library.advise_huge(memory.data_ptr(), num_bytes)
    return memory
