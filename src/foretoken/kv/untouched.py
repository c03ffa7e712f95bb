"""Zeros that take no memory before they are written: what slots of a cache are kept in.

PyTorch's own zeros are written once when they are made, all of them, which for a cache of gigabytes
takes the memory and seconds. The system gives pages of zeros when they are first touched.
"""

import mmap
import os
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor


def untouched_zeros(size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros; on a GPU, or where there are no such pages, an ordinary one."""
    count = prod(size)
    if device.type != "cpu" or os.name != "posix" or count == 0:
        return torch.zeros(size, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(*size)
