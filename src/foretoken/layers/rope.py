"""Rotary positions (Su et al. 2021) in the half-split layout of Hugging Face Llama.

The tables are computed once in float32 for every position and stored in the model's type; a step
gathers its rows once, for all layers.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors of one step's tokens, [T, 1, h]; the first half of `sin` carries the minus sign."""

    cos: Tensor
    sin: Tensor


class RotaryTable:
    """cos and sin for positions [0, max_positions)."""

    def __init__(self, *, head_dim: int, theta: float, max_positions: int, like: Tensor) -> None:
        """Compute the tables in the type and on the device of `like`."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        angles = torch.outer(torch.arange(max_positions).float(), 1.0 / theta**exponents)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(like.device, like.dtype)
        self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(like.device, like.dtype)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rows of these positions."""
        return Rotation(
            self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
        )


def rotate(x_THh: Tensor, rotation: Rotation) -> Tensor:
    """Rotate every head of every token."""
    half = x_THh.shape[-1] // 2
    return torch.addcmul(x_THh * rotation.cos, x_THh.roll(half, -1), rotation.sin)
