"""Muon, the optimizer of hidden matrices: momentum whose update is made orthogonal.

Owns the rule (Jordan et al. 2024) and its momentum. It knows neither the schedule nor which
parameters it is given. `torch.optim.Muon` does the same, always in bfloat16: on a processor that
does not multiply bfloat16 its step takes longer than the gradients it steps by.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.training.precision import product_type

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 that lift small singular values fastest; they end in 0.7..1.2."""
ITERATIONS = 5
MOMENTUM = 0.95


def orthogonal(matrix: Tensor, kind: torch.dtype) -> Tensor:
    """About U V^T of `matrix` = U S V^T, [M, N] float32, by Newton-Schulz iterations in `kind`."""
    linear, cubic, quintic = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    found: Tensor = (matrix / matrix.norm().clamp(min=1e-7)).to(kind)
    found = found.transpose(0, 1) if tall else found
    for _ in range(ITERATIONS):
        gram = found @ found.transpose(0, 1)
        gram = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        found = torch.addmm(found, gram, found, beta=linear)
    found = found.transpose(0, 1) if tall else found
    return found.to(matrix.dtype)


class Muon:
    """Nesterov momentum made orthogonal, with decoupled weight decay, for matrices alone."""

    def __init__(self, matrices: Iterable[nn.Parameter], weight_decay: float) -> None:
        self._matrices, self._weight_decay = list(matrices), weight_decay
        self._momenta: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix that has a gradient; tall ones further, by rows over columns."""
        for index, matrix in enumerate(self._matrices):
            gradient = matrix.grad
            if gradient is None:
                continue
            if index not in self._momenta:
                self._momenta[index] = torch.zeros_like(gradient)
            momentum = self._momenta[index].lerp_(gradient, 1 - MOMENTUM)
            ahead = gradient.lerp(momentum, MOMENTUM)
            further = math.sqrt(max(1.0, matrix.shape[0] / matrix.shape[1]))
            matrix.mul_(1 - rate * self._weight_decay)
            matrix.add_(orthogonal(ahead, product_type(matrix.device)), alpha=-rate * further)

    def state_dict(self) -> dict[str, Any]:
        """The momenta by the matrix's place, laid out as PyTorch's optimizers do."""
        momenta = self._momenta.items()
        return {"state": {index: {"momentum_buffer": momentum} for index, momentum in momenta}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the momenta of a checkpoint."""
        self._momenta = {
            index: kept["momentum_buffer"].to(self._matrices[index].device)
            for index, kept in state["state"].items()
        }
