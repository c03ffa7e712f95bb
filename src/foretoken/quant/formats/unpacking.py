"""Integers packed into 32-bit words, and matrices whose inputs are not in the order of groups."""

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.arrange import Weights
from foretoken.quant.weights import IntWeights

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's GEMM layout keeps the k-th of eight outputs."""


def unpack(words_XY: Tensor, bits: int, *, awq: bool = False) -> Tensor:
    """Values of each word's parts, lowest first: int32 [X, Y] -> uint8 [X, Y * 32 / bits]."""
    order = _AWQ_ORDER if awq else range(32 // bits)
    parts = [(words_XY >> (bits * at) & ((1 << bits) - 1)).to(torch.uint8) for at in order]
    return torch.stack(parts, 2).flatten(1)


def bits_of(name: str, inputs: int, words: int) -> int:
    """Bits of each of `inputs` values that lie in so many words. Raises CheckpointError: neither 4
    nor 8."""
    for bits in (4, 8):
        if words == -(-inputs * bits // 32):
            return bits
    given = f"{name}: {inputs} values in {words} words"
    raise CheckpointError("packed weights", given, "4 or 8 bits each")


def weights_of(values_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor | None, bits: int) -> Weights:
    """(value - zero) * scale of unsigned values, as integers where kernels hold them.

    Args:
        values_NK: uint8.
        scale_NG: any floating type.
        zero_NG: whole numbers; None: the middle.
        bits: 4 or 8.
    """
    middle, scale_NG = float(1 << (bits - 1)), scale_NG.float()
    if zero_NG is not None and bool((zero_NG == middle).all()):
        zero_NG = None
    if bits == 4:
        zeros = None if zero_NG is None else zero_NG.float()
        return IntWeights(bits=4, values_NK=values_NK, scale_NG=scale_NG, zero_NG=zeros)
    if zero_NG is not None:
        return dequantize(values_NK, scale_NG, zero_NG)
    return IntWeights(bits=8, values_NK=(values_NK ^ 128).view(torch.int8), scale_NG=scale_NG)


def dequantize(values_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor) -> Tensor:
    """(value - zero) * scale in float32."""
    groups = values_NK.float().unflatten(1, (scale_NG.shape[1], -1))
    matrix: Tensor = groups.sub_(zero_NG.float()[..., None]).mul_(scale_NG.float()[..., None])
    return matrix.flatten(1)


def in_group_order(index_K: Tensor, group: int) -> bool:
    """Whether input k belongs to group k / group, for every k."""
    inputs = index_K.shape[0]
    return bool((index_K == torch.arange(inputs, device=index_K.device) // group).all())


def by_index(values_NK: Tensor, scale_NG: Tensor, zero_NG: Tensor, index_K: Tensor) -> Tensor:
    """(value - zero) * scale in float32, where input k belongs to group index_K[k]."""
    index_K = index_K.long()
    if int(index_K.min()) < 0 or int(index_K.max()) >= scale_NG.shape[1]:
        given = f"{int(index_K.min())} to {int(index_K.max())}"
        raise CheckpointError("g_idx", given, f"0 to {scale_NG.shape[1] - 1}")
    matrix = values_NK.float().sub_(zero_NG.float()[:, index_K])
    return matrix.mul_(scale_NG.float()[:, index_K])
