"""How fast memory can be read right now, and how long a token takes if that is all: the floor.

Decoding one sequence on a CPU hangs on it. On a machine shared with others it changes from minute
to minute, so every figure that is compared over minutes has it beside it. Knows nothing of engines.
"""

import ctypes
import os
import time
from collections.abc import Callable

import torch

from foretoken.kernels.library import Library, find_library
from foretoken.shape.memory_formula import engine_storage, weight_bytes
from foretoken.shape.model import ModelShape

BYTES = 2**29
"""More than any cache of a small machine holds."""
TRIES = 3


def reader(library: Library) -> Callable[[int, int], int]:
    """Reads so many bytes at an address with the library's own threads and adds nothing up."""
    kinds = (ctypes.c_void_p, ctypes.c_size_t)
    read: Callable[[int, int], int] = library.function("ft_read_memory", kinds, ctypes.c_uint64)
    return read


class ReadProbe:
    """Reads a buffer as fast as it can be read."""

    def __init__(self, threads: int) -> None:
        """Make the buffer; `threads` read it, at most as many as there are cores."""
        self._library = find_library()
        if self._library is None:
            return
        self._library.use_threads(min(threads, len(os.sched_getaffinity(0))))
        self._buffer = torch.ones(BYTES // 8, dtype=torch.int64)
        self._read = reader(self._library)

    def gb_per_s(self) -> float:
        """The fastest of a few tries, 1e9 bytes/s; 0 where there are no kernels to read with."""
        if self._library is None:
            return 0.0
        found = []
        for _ in range(TRIES):
            began = time.perf_counter()
            self._read(self._buffer.data_ptr(), BYTES)
            found.append(BYTES / (time.perf_counter() - began) / 1e9)
        return max(found)


def floor_bytes(shape: ModelShape, weights: str, context: float) -> float:
    """What a token reads after `context` positions: all weights, in 16 bits, int8 or int4, but the
    table of embeddings, and keys and values of 16 bits."""
    counts = shape.weight_counts()
    storage = engine_storage(2, None if weights == "16 bit" else weights)
    keys = 2 * context * shape.num_hidden_layers * shape.kv_size * 2
    return weight_bytes(counts, storage) - counts.table * storage.table + keys
