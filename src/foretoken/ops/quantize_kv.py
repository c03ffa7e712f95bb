"""Keys and values as the store keeps them: in the model's type, or as int8 with a scale.

In int8 each head of a token is its numbers, -127 to 127, and the float32 that they are multiplied
with, largest / 127: h + 4 bytes. They depend on that head alone, so a token's stored
bits cannot depend on its neighbours. native/rows_body.h rounds to the same bits, and
native/attention_body.h multiplies out to the same bits; this is the twin of both.

A scale lies behind the numbers of its head. On a GPU all scales of a token lie behind all of its
numbers: a head is read 16 bytes at a time. Either way a token is one row of K * (h + 4) bytes.

Shape letters: T tokens, K heads of keys and of values, h head size.
"""

from typing import Final

import torch
from torch import Tensor

from foretoken.kernels.triton.found import is_on_gpu
from foretoken.shape.memory_formula import KV_SCALE_BYTES

_LARGEST: Final = 127
_SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny


def kv_store_dtype(kv_cache_dtype: str) -> torch.dtype | None:
    """How a store keeps keys and values under this setting; None: in the model's type."""
    return torch.int8 if kv_cache_dtype == "int8" else None


def quantize_kv(kv_TKh: Tensor, store_dtype: torch.dtype) -> Tensor:
    """What a store of `store_dtype` keeps of these: [T, K, h] as they are, or int8 [T, K, h + 4].

    A head with something in it that is not finite gets NaN for a scale.
    """
    if store_dtype != torch.int8:
        return kv_TKh
    numbers = kv_TKh.float()
    scale_TK1 = numbers.abs().amax(dim=-1, keepdim=True) / _LARGEST
    scale_TK1 = scale_TK1.clamp(min=_SMALLEST_SCALE) + (numbers * 0).sum(dim=-1, keepdim=True)
    rounded = (numbers / scale_TK1).round_().nan_to_num_(nan=-_LARGEST).to(torch.int8)
    kept = rounded.new_empty(*rounded.shape[:-1], rounded.shape[-1] + KV_SCALE_BYTES)
    numbers, scales = numbers_and_scales(kept)
    numbers.copy_(rounded)
    scales.copy_(scale_TK1.view(torch.int8))
    return kept


def numbers_and_scales(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Views of what a store keeps in int8, [..., K, h + 4]: [..., K, h], and bytes of scales."""
    *_, heads, width = kept.shape
    size = width - KV_SCALE_BYTES
    if not is_on_gpu(kept):
        return kept[..., :size], kept[..., size:]
    numbers, scales = kept.flatten(-2).split((heads * size, heads * KV_SCALE_BYTES), -1)
    return numbers.unflatten(-1, (heads, size)), scales.unflatten(-1, (heads, KV_SCALE_BYTES))


def dequantize(kept: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys and values [..., K, h] in `dtype` from what a store keeps of them."""
    if kept.dtype != torch.int8:
        return kept
    numbers, scales = numbers_and_scales(kept)
    return (numbers.float() * scales.contiguous().view(torch.float32)).to(dtype)
