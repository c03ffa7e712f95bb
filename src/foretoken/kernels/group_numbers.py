"""Scales and zero points of groups in as few bits as hold all of them exactly.

They are read beside the weights at every token: with 4-bit weights in groups of 32, float32 ones
are a fifth of all bytes. Knows no layout.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class GroupNumbers(NamedTuple):
    """Of one matrix, both of one type: float16 or float32."""

    scale: Tensor
    zero: Tensor | None


def in_few_bits(scale: Tensor, zero: Tensor | None) -> GroupNumbers:
    """Both as float16 if that changes none of them, else as float32."""
    given = [scale] if zero is None else [scale, zero]
    exact = all(torch.equal(numbers.half().float(), numbers.float()) for numbers in given)
    kept = [numbers.to(torch.float16 if exact else torch.float32) for numbers in given]
    return GroupNumbers(kept[0], kept[1] if len(kept) > 1 else None)
