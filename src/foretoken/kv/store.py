"""The tensors behind the pages: keys and values of every slot, one tensor per layer.

Slot = page * page_size + offset. Invariants: every element is finite from the start (masked
attention multiplies what it must ignore by zero, and 0 * nan is nan); `SLACK` slots follow the
last page so that a view rounded up from any slot stays inside the tensor. Knows neither
sequences nor who owns a page.
"""

import torch
from torch import Tensor

from foretoken.shape import ModelShape

SLACK = 512
"""Slots after the last page; attention may round a length up by at most this much."""


class KVStore:
    """KV of `num_pages` pages for one model."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeros; memory the system has not touched yet costs nothing."""
        assert num_pages > 0, num_pages
        assert page_size > 0, page_size
        self.page_size = page_size
        self.num_slots = num_pages * page_size
        slots = self.num_slots + -(-SLACK // page_size) * page_size
        size = (slots, 2, shape.num_key_value_heads, shape.head_dim)
        self.layers: list[Tensor] = [
            torch.zeros(size, dtype=dtype, device=device) for _ in range(shape.num_hidden_layers)
        ]
        """Per layer [slots, key or value, key-value heads, head_dim]."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers, slack included."""
        return sum(layer.numel() * layer.element_size() for layer in self.layers)
