"""RMS norm. A row's result does not depend on its neighbours, so there is nothing to make fast
and invariant separately. Source: Zhang and Sennrich 2019.
"""

from torch import Tensor
from torch.nn import functional as F


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype."""
    return F.rms_norm(x_TD, weight_D.shape, weight_D, eps)
