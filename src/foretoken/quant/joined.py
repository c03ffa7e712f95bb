"""Matrices of different kinds that share their rows: each runs, results lie side by side."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from foretoken.ops.linear import KernelLinear, Linear


@final
class JoinedLinear(Linear):
    """y = [x A^T, x B^T, ...]; a row's bits are those of the parts."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        """Parts in the order of their outputs."""
        self.parts = tuple(parts)

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Apply every part; the residual is added to the results side by side."""
        y_TN = torch.cat([part(x_TK) for part in self.parts], 1)
        return y_TN if residual_TN is None else y_TN.add_(residual_TN)


def join(parts: Sequence[Linear]) -> Linear:
    """The parts as one layer: one call where all of them are the kernels'."""
    first, *others = parts
    if not others:
        return first
    kernels = [part for part in others if isinstance(part, KernelLinear)]
    if isinstance(first, KernelLinear) and len(kernels) == len(others):
        first.join(kernels)
        return first
    return JoinedLinear(parts)
