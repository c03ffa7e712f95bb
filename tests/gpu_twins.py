"""A GPU's steps on the CPU: everything but the kernels themselves, which are PyTorch's twins."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from foretoken.backend import backend_for, make_backend
from foretoken.kernels.library import VARIABLE, find_library
from foretoken.ops.gpu import twin_kernels
from foretoken.ops.gpu.twin_kernels import TwinKernels

VIEWS = frozenset(
    "view _unsafe_view expand slice select transpose t permute unsqueeze squeeze split alias "
    "detach as_strided unbind narrow split_with_sizes lift_fresh reshape resolve_neg "
    "resolve_conj".split()
)


class Asked(TorchDispatchMode):
    """Operations by name, views aside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name not in VIEWS:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def asked() -> Iterator[Counter[str]]:
    """What is asked of PyTorch outside of kernels, and how often the host reads a tensor."""
    compute, tolist = twin_kernels.compute, torch.Tensor.tolist

    depth = 0

    def inside(*args: Any, **kwargs: Any) -> None:
        nonlocal depth
        depth += 1
        with _disable_current_modes():
            compute(*args, **kwargs)
        depth -= 1

    with pytest.MonkeyPatch.context() as patch, Asked() as mode:
        patch.setattr(twin_kernels, "compute", inside)

        def read(self: torch.Tensor) -> Any:
            mode.found["read by the host"] += not depth
            return tolist(self)

        patch.setattr(torch.Tensor, "tolist", read)
        yield mode.found


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
    make_backend.cache_clear()
    find_library.cache_clear()
