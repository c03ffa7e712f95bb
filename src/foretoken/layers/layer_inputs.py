"""What each layer gets of each token beside the stream (Gemma 3n and 4): a row of a table, and a
projection of the token's embedding."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.layers.embedding import Embedding
from foretoken.layers.mlp import gate
from foretoken.layers.norm import RMSNorm
from foretoken.ops.activation import Activation
from foretoken.ops.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInputs:
    """Those of all layers: [T, L, P]."""

    table: Embedding
    """[V, L * P]."""
    table_scale: Tensor
    """One number in the model's type, P ** 0.5."""
    projection: Linear
    """[T, D] -> [T, L * P]."""
    norm: RMSNorm
    layers: int

    def __call__(self, tokens_T: Tensor, x_TD: Tensor) -> Tensor:
        """From the tokens and what the first layer is given."""
        known_TI = self.table(tokens_T) * self.table_scale
        made_TI = self.projection(x_TD) * x_TD.shape[1] ** -0.5
        width = made_TI.shape[1] // self.layers
        made_TI = self.norm(made_TI.reshape(-1, width)).view(made_TI.shape)
        both_TI = (made_TI + known_TI) * math.sqrt(0.5)
        return both_TI.view(-1, self.layers, width)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerInput:
    """What one layer makes of its own: x + norm(project(act(gate(x)) * input))."""

    gate: Linear
    activate: Activation
    projection: Linear
    norm: RMSNorm

    def __call__(self, x_TD: Tensor, input_TP: Tensor) -> Tensor:
        """The stream after it."""
        both = torch.cat([self.gate(x_TD), input_TP], dim=1)
        return self.norm(self.projection(gate(both, self.activate)), x_TD)
