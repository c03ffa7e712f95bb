"""The gated activation of Llama-like MLPs (SwiGLU, Shazeer 2020), the same bits for any rows."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu(x_TF: Tensor) -> Tensor:
    """x * sigmoid(x).

    PyTorch's float32 silu computes the ends of each thread's share with other instructions than
    the middle, and where a share ends depends on the number of rows. exp, + and / do not differ.
    """
    if x_TF.dtype != torch.float32:
        return F.silu(x_TF)
    return x_TF / x_TF.neg().exp_().add_(1.0)
