"""Muon for the hidden matrices, AdamW for everything else, stepped as one.

Owns which parameter gets which rule. It knows no schedule: the caller passes the factor on the
peak rates.
"""

from typing import Any

import torch
from torch import nn

from foretoken.training.muon import Muon
from foretoken.training.settings import Settings

TABLES = ("emb", "head", "lm_head", "markov_head", "confidence_head")
"""How the names of matrices begin that are no hidden ones: with a row a token, or a single row."""


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
