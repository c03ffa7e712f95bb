"""Blocks of GGUF tensors as kernels hold them: integers in groups, or the blocks as they are.

Layouts are ggml's: a block starts with its scales; the low halves of its bytes come first. What is
in neither table is multiplied out by the `gguf` package.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.quant.blocks import BlockWeights
from foretoken.quant.weights import IntWeights
from foretoken.shape.block_kinds import BLOCK_KINDS


def decode(kind: str, rows_NB: Tensor) -> IntWeights | BlockWeights | None:
    """The matrix in rows of blocks.

    Args:
        kind: ggml's name of the type.
        rows_NB: uint8, the bytes of each row; blocks that are kept as they are refer to them.

    Returns:
        None: no kernel holds this type.
    """
    if kind in BLOCK_KINDS:
        return BlockWeights.as_stored(kind, rows_NB)
    if kind not in _DECODERS:
        return None
    size, decoder = _DECODERS[kind]
    return decoder(rows_NB.unflatten(1, (-1, size)))


def _halves(blocks: Tensor) -> Tensor:
    """The 16-bit float that each block begins with, as float32 [N, blocks]."""
    return blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()


def _q8_0(blocks: Tensor) -> IntWeights:
    values = blocks[..., 2:].contiguous().view(torch.int8)
    return IntWeights(bits=8, values_NK=values.flatten(1), scale_NG=_halves(blocks))


def _q4_0(blocks: Tensor) -> IntWeights:
    values = torch.cat([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], -1)
    return IntWeights(bits=4, values_NK=values.flatten(1), scale_NG=_halves(blocks))


_DECODERS: dict[str, tuple[int, Callable[[Tensor], IntWeights]]] = {
    "Q8_0": (34, _q8_0),
    "Q4_0": (18, _q4_0),
}
"""Bytes of a block, and how it is read. Weights are the file's, exactly."""
