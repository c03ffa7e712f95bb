"""Blocks of GGUF tensors as integer weights, for the types that kernels hold exactly.

Layouts are ggml's: a block starts with its scales; the low halves of its bytes come first. Other
types are multiplied out by the `gguf` package.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.quant.weights import IntWeights


def decode(kind: str, rows_NB: Tensor) -> IntWeights | None:
    """The matrix in rows of blocks.

    Args:
        kind: ggml's name of the type.
        rows_NB: uint8, the bytes of each row.

    Returns:
        None: no kernel holds this type.
    """
    if kind not in _DECODERS:
        return None
    size, decoder = _DECODERS[kind]
    return decoder(rows_NB.unflatten(1, (-1, size)))


def _halves(blocks: Tensor, start: int) -> Tensor:
    """The 16-bit float at a place of each block, as float32 [N, blocks]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves, then high ones, of the last dimension."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _q8_0(blocks: Tensor) -> IntWeights:
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return IntWeights(bits=8, values_NK=values.flatten(1), scale_NG=_halves(blocks, 0))


def _q4_0(blocks: Tensor) -> IntWeights:
    values = _nibbles(blocks[..., 2:])
    return IntWeights(bits=4, values_NK=values.flatten(1), scale_NG=_halves(blocks, 0))


def _q4_1(blocks: Tensor) -> IntWeights:
    values = _nibbles(blocks[..., 4:])
    return _above_minimum(values.flatten(1), _halves(blocks, 0), -_halves(blocks, 2))


def _q4_k(blocks: Tensor) -> IntWeights:
    """Eight groups of 32 with scales and minima of 6 bits, in units of the block's two floats."""
    small = blocks[..., 4:16]
    first, second, third = small[..., :4], small[..., 4:8], small[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32)))
    scale = _halves(blocks, 0)[..., None] * scales
    minimum = _halves(blocks, 2)[..., None] * minima
    return _above_minimum(values.flatten(1), scale.flatten(1), minimum.flatten(1))


def _above_minimum(values_NK: Tensor, scale_NG: Tensor, minimum_NG: Tensor) -> IntWeights:
    """value * scale - minimum. Groups without a scale are all their minimum."""
    flat = scale_NG == 0
    group = values_NK.shape[1] // scale_NG.shape[1]
    values_NK = values_NK * ~flat.repeat_interleave(group, 1)
    return IntWeights(
        bits=4,
        values_NK=values_NK,
        scale_NG=torch.where(flat, minimum_NG, scale_NG),
        zero_NG=torch.where(flat, 1.0, minimum_NG / scale_NG),
    )


_DECODERS: dict[str, tuple[int, Callable[[Tensor], IntWeights]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
}
"""Type -> bytes of a block, and its decoder."""
