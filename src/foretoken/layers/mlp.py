"""The gated MLP of Llama: down(act(gate(x)) * up(x)), gate and up as one matrix."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.backend import backend_for
from foretoken.ops.activation import COMPILED, Activation
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


def gate(both_TF: Tensor, activate: Activation) -> Tensor:
    """activate(gate) * up of rows [T, 2 F] that hold gate, then up."""
    kernels = backend_for(both_TF.device).rows(both_TF)
    if kernels is not None and activate in COMPILED:
        return kernels.gate(both_TF, COMPILED[activate])
    gate_TF, up_TF = both_TF.chunk(2, dim=-1)
    return activate(gate_TF).mul_(up_TF)
