"""Linear layers by oneDNN over weights packed once: the fast path where there are no kernels."""

from typing import final

import torch
from torch import Tensor

from foretoken.ops.linear.base import Linear


@final
class PackedLinear(Linear):
    """oneDNN over weights that were packed once; bfloat16 and float32 on a CPU.

    The sum with the residual is rounded once instead of twice.
    """

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self._bias_N = bias_N
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_NK.contiguous(), None)
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self._apply_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """One oneDNN call."""
        y_TN: Tensor
        if residual_TN is None:
            y_TN = self._apply(x_TK, self._packed, self._bias_N, "none", [], "")
        else:
            y_TN = self._apply_add(x_TK, residual_TN, self._packed, self._bias_N, "add")
        return y_TN


def can_pack(weight_NK: Tensor) -> bool:
    """Whether oneDNN packs weights of this type, which lie on the CPU."""
    if weight_NK.dtype == torch.float16 or not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(weight_NK[:1].contiguous(), None)
    except RuntimeError:
        return False
    return True
