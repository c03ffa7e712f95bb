"""RMS norm (Zhang and Sennrich 2019), row by row. Weights in float32 make the whole norm float32:
Gemma's are stored as a difference from 1 that bfloat16 would round away."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foretoken.backend import backend_for


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """x / rms(x) * weight over the last dimension, in the type of x."""

    weight_D: Tensor
    eps: float

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """Normalize rows, and add the residual if there is one."""
        kernels = backend_for(x_TD.device).rows(x_TD)
        if kernels is not None:
            return kernels.norm(x_TD, self.weight_D, self.eps, residual_TD)
        normed = self.reference(x_TD)
        return normed if residual_TD is None else residual_TD + normed

    def reference(self, x: Tensor) -> Tensor:
        """The norm by PyTorch's operations, for any number of dimensions."""
        if self.weight_D.dtype == x.dtype:
            return F.rms_norm(x, self.weight_D.shape, self.weight_D, self.eps)
        wide = x.to(self.weight_D.dtype)
        return F.rms_norm(wide, self.weight_D.shape, self.weight_D, self.eps).to(x.dtype)
