"""Weights of fewer bits: how they are rounded, what they mean, and the layers that use them.

The kernels' part is `kernels.linear`; everything here is plain PyTorch.
"""

from foretoken.quant.arrange import Weights
from foretoken.quant.joined import JoinedLinear
from foretoken.quant.layer import quantized_linear, rounded_linear
from foretoken.quant.rounding import round_weights
from foretoken.quant.weights import IntWeights, Scheme, scheme_of

__all__ = [
    "IntWeights",
    "JoinedLinear",
    "Scheme",
    "Weights",
    "quantized_linear",
    "round_weights",
    "rounded_linear",
    "scheme_of",
]
