"""Activations of MLPs, most of them gated (Shazeer 2020), the same bits for any rows.

PyTorch's float32 kernels compute the ends of each thread's share with other instructions than
the middle, and where a share ends depends on the number of rows. exp, +, * and / do not differ.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

SWISH_ALPHA = 1.702
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


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), computed in float32."""
    return x.float().neg().exp_().add_(1.0).reciprocal_().to(x.dtype)


def clamped_swish(x_TF: Tensor, limit: float) -> Tensor:
    """(u + 1) g sigmoid(1.702 g) of rows that hold gate, then up, both clamped (OpenAI 2025, arXiv
    2508.10925); computed in float32."""
    gate_TF, up_TF = x_TF.float().chunk(2, dim=-1)
    gate_TF = gate_TF.clamp(max=limit)
    gated = gate_TF / (gate_TF * -SWISH_ALPHA).exp_().add_(1.0)
    return ((up_TF.clamp(-limit, limit) + 1.0) * gated).to(x_TF.dtype)


def squared_relu(x_TF: Tensor) -> Tensor:
    """max(x, 0) squared (So et al. 2021, arXiv 2109.08668)."""
    return x_TF.clamp(min=0).square()


COMPILED: dict[Activation, int] = {silu: 0, gelu_tanh: 1, sigmoid: 2}
"""The numbers of native/rows.h."""
ACTIVATIONS: dict[str, Activation] = {"silu": silu, "gelu_pytorch_tanh": gelu_tanh}
"""By the name in config.json."""
