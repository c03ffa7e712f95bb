"""The gated MLP of Llama: down(act(gate(x)) * up(x)), gate and up as one matrix."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.ops.activation import Activation, gate
from foretoken.ops.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMLP:
    """x [T, D] -> [T, D]."""

    gate_up: Linear
    down: Linear
    activate: Activation

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """mlp(x), plus the residual if there is one."""
        both = self.gate_up(x_TD)
        return self.down(gate(both, self.activate), residual_TD)
