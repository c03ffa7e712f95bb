"""Zeros that take no memory before they are written: what slots of a cache are kept in.

PyTorch's own zeros are written once when they are made, all of them, which for a cache of gigabytes
takes the memory and seconds. The system gives pages of zeros when they are first touched; where
there are many, huge ones are asked for, through which attention reads faster.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

from foretoken.hardware import advise_memory

_MANY = 64 << 20
"""Bytes of a tensor from which on a huge page, 2 MiB to be zeroed at once, is little of it."""
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0)
_MADV_DONTNEED: int = getattr(mmap, "MADV_DONTNEED", 4)
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def lazy_zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a GPU, or where there are no such pages, an ordinary one."""
    count = prod(size)
    if device.type != "cpu" or os.name != "posix" or count == 0:
        return torch.zeros(size, dtype=dtype, device=device)
    # There are more pages than can all be written, so the system is not asked to promise them.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    if count * dtype.itemsize >= _MANY and _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # Kernels without huge pages refuse.
            memory.madvise(_MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*size)


def gives_back(device: torch.device) -> bool:
    """Whether memory of such tensors can be given back: a CPU's, where the system is Linux."""
    return device.type == "cpu" and sys.platform == "linux"


def give_back(rows_SX: Tensor, first: int, stop: int) -> None:
    """Give the memory of rows [first, stop) back; they are zeros, but for what shares a page of the
    system with other rows.

    Args:
        rows_SX: all of a tensor of `lazy_zeros`, where `gives_back`.
        first: index of a row.
        stop: one behind the last row.
    """
    size, page = rows_SX.stride(0) * rows_SX.element_size(), mmap.PAGESIZE
    base = rows_SX.data_ptr()
    begin, end = -(-(base + first * size) // page) * page, (base + stop * size) // page * page
    if begin < end:
        advise_memory(begin, end - begin, _MADV_DONTNEED)
