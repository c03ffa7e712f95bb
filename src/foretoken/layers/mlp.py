"""The gated MLP of Llama: down(silu(gate(x)) * up(x)), gate and up as one matrix."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.ops.activation import silu
from foretoken.ops.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """x [T, D] -> [T, D]."""

    gate_up: Linear
    down: Linear
    width: int

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """residual + mlp(x)."""
        both = self.gate_up(x_TD)
        return self.down(silu(both[:, : self.width]).mul_(both[:, self.width :]), residual_TD)
