"""A GPU's steps on the CPU: everything but the kernels themselves, which are PyTorch's twins."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from foretoken.backend import backend_for
from foretoken.kernels.library import VARIABLE, find_library
from foretoken.ops.twin_kernels import TwinKernels


@contextmanager
def twins() -> Iterator[TwinKernels]:
    """Inside, the CPU is served by twins of the GPU's kernels."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, "twins")
        forget()
        try:
            kernels = backend_for(torch.device("cpu")).gpu
            assert isinstance(kernels, TwinKernels)
            yield kernels
        finally:
            forget()
            torch.set_num_threads(threads)


def forget() -> None:
    """Ask again which kernels serve the CPU."""
    backend_for.cache_clear()
    find_library.cache_clear()
