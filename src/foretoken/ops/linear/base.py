"""What a linear layer is, and its reference."""

from abc import ABC, abstractmethod
from typing import final

import torch.nn.functional as F
from torch import Tensor


class Linear(ABC):
    """y = x W^T (+ bias) (+ residual) for rows [T, K] -> [T, N]."""

    @abstractmethod
    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """Apply it; the residual is not changed."""

    @property
    def kept(self) -> str:
        """How it keeps its weights, in words."""
        return "floats without a kernel"

    @property
    def fixed_bits(self) -> int:
        """Bits of the fixed point that it rounds rows to; 0: it does not."""
        return 0


@final
class PlainLinear(Linear):
    """The reference: any device, any type, rows as they come."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None = None) -> None:
        self.weight_NK = weight_NK
        self.bias_N = bias_N

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        """F.linear, and an addition."""
        y_TN = F.linear(x_TK, self.weight_NK, self.bias_N)
        return y_TN if residual_TN is None else y_TN.add_(residual_TN)
