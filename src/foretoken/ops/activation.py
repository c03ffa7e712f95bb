"""The gated activation of Llama-like MLPs (SwiGLU, Shazeer 2020)."""

from torch import Tensor
from torch.nn import functional as F


def silu_and_multiply(gate_up_TF: Tensor) -> Tensor:
    """silu(gate) * up of a [T, 2F] tensor that holds gate in its first half: [T, F]."""
    gate_TF, up_TF = gate_up_TF.chunk(2, -1)
    return F.silu(gate_TF).mul_(up_TF)
