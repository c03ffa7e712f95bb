"""The gated activations of Llama-like MLPs (Shazeer 2020), the same bits for any rows.

PyTorch's float32 kernels compute the ends of each thread's share with other instructions than
the middle, and where a share ends depends on the number of rows. exp, +, * and / do not differ.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]
"""x -> a new tensor of the same shape and type."""


def silu(x_TF: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    if x_TF.dtype != torch.float32:
        return F.silu(x_TF)
    return x_TF / x_TF.neg().exp_().add_(1.0)


def gelu_tanh(x_TF: Tensor) -> Tensor:
    """x * Phi(x) with the tanh approximation (Hendrycks and Gimpel 2016), computed in float32.

    0.5 * (1 + tanh(u)) is sigmoid(2 u), which takes one exp.
    """
    wide = x_TF.float()
    inner = wide.square().mul_(0.044715).add_(1.0).mul_(wide).mul_(-2 * math.sqrt(2 / math.pi))
    return (wide / inner.exp_().add_(1.0)).to(x_TF.dtype)


COMPILED: dict[Activation, int] = {silu: 0, gelu_tanh: 1}
"""The numbers of native/rows.h."""
ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}
"""By the name in config.json."""
