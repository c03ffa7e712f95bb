"""Rotary position embedding (Su et al. 2021), in the half-split layout of Hugging Face's models.

The angles of all positions are computed once in float32; a step gathers its rows once, and every
layer rotates queries and keys with three elementwise operations. Each element is rounded the
same way wherever it stands, so the result does not depend on the number of rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and signed sin of a step's positions, each [T, 1, head_dim], in the model's dtype."""

    cos: Tensor
    sin: Tensor
    """Negative in its first half."""

    def apply_(self, heads_THd: Tensor) -> Tensor:
        """Rotate every head in place; heads of one token share its angles."""
        turned = torch.roll(heads_THd, heads_THd.shape[-1] // 2, -1)
        return heads_THd.mul_(self.cos).add_(turned.mul_(self.sin))


class RotaryTable:
    """Rotations of positions [0, num_positions)."""

    def __init__(
        self,
        head_dim: int,
        num_positions: int,
        theta: float,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Compute theta^(-2i / head_dim) * position in float64 and keep cosines and sines."""
        steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
        positions = torch.arange(num_positions, dtype=torch.float64)
        angles = torch.outer(positions, theta**-steps)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], -1)[:, None].to(device, dtype)
        self._sin = torch.cat([-sin, sin], -1)[:, None].to(device, dtype)

    def at(self, positions_T: Tensor) -> Rotation:
        """Rotations of int64 positions."""
        return Rotation(self._cos[positions_T], self._sin[positions_T])
