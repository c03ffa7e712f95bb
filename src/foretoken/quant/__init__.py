"""Weights of fewer bits: how they are rounded, what they mean, and how they are stored.

The kernels' part is `kernels.linear`. Which layer uses them is chosen by `foretoken.backend`.
"""

from foretoken.quant.arrange import Weights
from foretoken.quant.blocks import BlockWeights
from foretoken.quant.joined import JoinedLinear, join
from foretoken.quant.rounding import round_weights
from foretoken.quant.weights import IntWeights, Scheme, scheme_of

__all__ = [
    "BlockWeights",
    "IntWeights",
    "JoinedLinear",
    "Scheme",
    "Weights",
    "join",
    "round_weights",
    "scheme_of",
]
