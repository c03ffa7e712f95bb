"""Muon for the hidden matrices, AdamW for everything else, stepped as one.

Owns which parameter gets which rule, and Muon (Jordan et al. 2024): momentum whose update is made
orthogonal. It knows no schedule: the caller passes the factor on the peak rates. `torch.optim.Muon`
does the same, always in bfloat16: on a processor that does not multiply bfloat16 its step takes
longer than the gradients it steps by.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from foretoken.training.precision import product_type
from foretoken.training.settings import Settings

TABLES = ("emb", "head", "lm_head", "markov_head", "confidence_head")
"""How the names of matrices begin that are no hidden ones: with a row a token, or a single row."""
QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of x, x^3 and x^5 that lift small singular values fastest; they end in 0.7..1.2."""
ITERATIONS = 5
MOMENTUM = 0.95


def orthogonal(matrices_NMK: Tensor, kind: torch.dtype) -> Tensor:
    """About U V^T of each [M, K] = U S V^T, by Newton-Schulz iterations in `kind`.

    Together, since one of them is too small for a GPU: [N, M, K] in, and out in the same type.
    """
    linear, cubic, quintic = QUINTIC
    tall = matrices_NMK.shape[1] > matrices_NMK.shape[2]
    norms = torch.linalg.matrix_norm(matrices_NMK, keepdim=True).clamp(min=1e-7)
    found: Tensor = (matrices_NMK / norms).to(kind)
    found = found.transpose(1, 2) if tall else found
    for _ in range(ITERATIONS):
        gram = found @ found.transpose(1, 2)
        gram = torch.baddbmm(gram, gram, gram, beta=cubic, alpha=quintic)
        found = torch.baddbmm(found, gram, found, beta=linear)
    found = found.transpose(1, 2) if tall else found
    return found.to(matrices_NMK.dtype)


class Muon:
    """Nesterov momentum made orthogonal, with decoupled weight decay, for matrices alone."""

    def __init__(self, matrices: Iterable[nn.Parameter], weight_decay: float) -> None:
        self._matrices, self._weight_decay = list(matrices), weight_decay
        self._momenta: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Move every matrix that has a gradient; tall ones further, by rows over columns."""
        alike: dict[torch.Size, dict[int, Tensor]] = {}
        for index, matrix in enumerate(self._matrices):
            if matrix.grad is not None:
                alike.setdefault(matrix.shape, {})[index] = matrix.grad
        for (rows, columns), gradients in alike.items():
            ahead = torch.stack(self._ahead(gradients))
            moves = list(orthogonal(ahead, product_type(ahead.device)))
            moved = [self._matrices[index].data for index in gradients]
            further = math.sqrt(max(1.0, rows / columns))
            torch._foreach_mul_(moved, 1 - rate * self._weight_decay)
            torch._foreach_add_(moved, moves, alpha=-rate * further)

    def _ahead(self, gradients: dict[int, Tensor]) -> list[Tensor]:
        """Momenta as Nesterov's rule looks ahead, after the gradients, by the matrix's place, are
        counted in."""
        for index, gradient in gradients.items():
            if index not in self._momenta:
                self._momenta[index] = torch.zeros_like(gradient)
        momenta, found = [self._momenta[index] for index in gradients], list(gradients.values())
        torch._foreach_lerp_(momenta, found, 1 - MOMENTUM)
        return list(torch._foreach_lerp(found, momenta, MOMENTUM))

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


class Optimizer:
    """Both optimizers behind one step; `scale` is the schedule's factor on the peak rates."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if p.dim() == 2 and not name.startswith(TABLES)]
        tables = [p for name, p in trained if p.dim() == 2 and name.startswith(TABLES)]
        vectors = [p for _, p in trained if p.dim() != 2]
        assert len(matrices) + len(tables) + len(vectors) == len(trained), "one rule each"
        self._matrices, self._others = matrices, [*tables, *vectors]
        self._rates, self._clip = (settings.matrix_rate, settings.other_rate), settings.clip_norm
        self._muon = Muon(matrices, settings.weight_decay)
        self._adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            betas=(0.9, 0.95),
            fused=True,
        )

    def step(self, scale: float) -> None:
        """Clip, apply the gradients with `scale` times the peak rates, and clear them."""
        nn.utils.clip_grad_norm_(self._others, self._clip)
        matrix_rate, other_rate = self._rates
        for group in self._adam.param_groups:
            group["lr"] = other_rate * scale
        self._adam.step()
        self._muon.step(matrix_rate * scale)
        for parameter in (*self._matrices, *self._others):
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {"0": self._adam.state_dict(), "1": self._muon.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both states."""
        self._adam.load_state_dict(state["0"])
        self._muon.load_state_dict(state["1"])
