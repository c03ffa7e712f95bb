"""RMS norm (Zhang and Sennrich 2019), row by row. Weights in float32 make the whole norm float32:
Gemma's are stored as a difference from 1 that bfloat16 would round away."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension, in the type of x."""

    weight_D: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize the last dimension."""
        if self.weight_D.dtype == x.dtype:
            return F.rms_norm(x, self.weight_D.shape, self.weight_D, self.eps)
        wide = x.to(self.weight_D.dtype)
        return F.rms_norm(wide, self.weight_D.shape, self.weight_D, self.eps).to(x.dtype)
