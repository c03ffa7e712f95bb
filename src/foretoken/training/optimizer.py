"""Muon for the hidden matrices, AdamW for everything else, stepped as one.

Owns which parameter gets which rule. It knows no schedule: the caller passes the factor on the
peak rates. Muon: Jordan et al. 2024.
"""

from typing import Any

import torch
from torch import nn

from foretoken.errors import ConfigError
from foretoken.training.settings import Settings

TABLES = ("emb", "head", "lm_head", "markov_head", "confidence_head")
"""How the names of matrices begin that are no hidden ones: with a row a token, or a single row."""


class Optimizer:
    """Both optimizers behind one step; `scale` is the schedule's factor on the peak rates."""

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        if not hasattr(torch.optim, "Muon"):
            allowed = "2.9 or later, which has Muon: pip install --upgrade torch"
            raise ConfigError("torch", torch.__version__, allowed)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        matrices = [p for name, p in trained if p.dim() == 2 and not name.startswith(TABLES)]
        tables = [p for name, p in trained if p.dim() == 2 and name.startswith(TABLES)]
        vectors = [p for _, p in trained if p.dim() != 2]
        assert len(matrices) + len(tables) + len(vectors) == len(trained), "one rule each"
        self._others, self._clip = [*tables, *vectors], settings.clip_norm
        adam = torch.optim.AdamW(
            [{"params": tables, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=settings.other_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        muon = torch.optim.Muon(
            matrices, lr=settings.matrix_rate, weight_decay=settings.weight_decay, momentum=0.95
        )
        self._parts: tuple[torch.optim.Optimizer, ...] = (adam, muon)
        self._peaks = (settings.other_rate, settings.matrix_rate)

    def step(self, scale: float) -> None:
        """Clip, apply the gradients with `scale` times the peak rates, and clear them."""
        nn.utils.clip_grad_norm_(self._others, self._clip)
        for part, peak in zip(self._parts, self._peaks, strict=True):
            for group in part.param_groups:
                group["lr"] = peak * scale
            part.step()
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Both states."""
        return {str(index): part.state_dict() for index, part in enumerate(self._parts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore both states."""
        for index, part in enumerate(self._parts):
            part.load_state_dict(state[str(index)])
