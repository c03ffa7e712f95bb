"""Zeros that take no memory before they are written: what slots of a cache are kept in.

PyTorch's own zeros are written once when they are made, all of them, which for a cache of gigabytes
takes the memory and seconds. The system gives pages of zeros when they are first touched; where
there are many, huge ones are asked for, through which attention reads faster.
"""

import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

_MANY = 64 << 20
"""Bytes of a tensor from which on a huge page, 2 MiB to be zeroed at once, is little of it."""
_MADV_HUGEPAGE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def untouched_zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a GPU, or where there are no such pages, an ordinary one."""
    count = prod(size)
    if device.type != "cpu" or os.name != "posix" or count == 0:
        return torch.zeros(size, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    if count * dtype.itemsize >= _MANY and _MADV_HUGEPAGE is not None:
        with suppress(OSError):  # Kernels without huge pages refuse.
            memory.madvise(_MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*size)
