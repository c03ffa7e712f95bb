"""The keys and values themselves: one tensor per layer, indexed by slot.

A slot is page * page_size + offset. What is in a row, the store does not read: `ops.quantize_kv`
knows how int8 is written. Knows nothing of sequences or of who uses a page. Everything
is finite at all times: attention reads masked slots and multiplies them by zero.
"""

from collections.abc import Iterable
from itertools import compress
from typing import Protocol

import torch
from torch import Tensor

from foretoken.kv.free_runs import Run
from foretoken.kv.lazy_zeros import give_back, lazy_zeros
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import KV_SCALE_BYTES

SLACK = 1024
"""Slots after the last page, never written: a view rounded up past the end stays inside."""


class KVShape(Protocol):
    """The sizes that keys and values have; `ModelShape` and the shapes of heads have them."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers with keys and values."""

    @property
    def num_key_value_heads(self) -> int:
        """Heads of keys, and of values."""

    @property
    def head_dim(self) -> int:
        """Values of a head."""


class KVStore:
    """Keys and values of `num_pages` pages for every layer of one model."""

    def __init__(
        self,
        shape: KVShape,
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        kv_heads: range | None = None,
    ) -> None:
        """Allocate zeros; on a CPU the memory is only taken as pages are written.

        Args:
            shape: of the model.
            num_pages: how many.
            page_size: slots of a page.
            dtype: the model's; or int8, with a float32 scale for each head.
            device: the model's.
            kv_heads: key heads of the model whose keys and values are kept here; None: all.
        """
        sizes = [(shape.num_key_value_heads, shape.head_dim)] * shape.num_hidden_layers
        self._windowed = [False] * shape.num_hidden_layers
        if isinstance(shape, ModelShape):
            sizes = [(one.heads, one.size) for one in shape.kv_sizes]
            self._windowed = [shape.window(layer) is not None for layer in range(len(sizes))]
        most = max(heads for heads, _ in sizes)
        self.kv_heads = kv_heads or range(most)
        inside = 0 <= self.kv_heads.start and self.kv_heads.stop <= most
        assert inside, f"{self.kv_heads} of {most} key heads"
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_slots = num_pages * page_size + SLACK
        scale = KV_SCALE_BYTES if dtype == torch.int8 else 0
        left_out = most - len(self.kv_heads)
        self.layers = [
            lazy_zeros(
                (self.num_slots, 2 * (heads - left_out), width + scale), dtype=dtype, device=device
            )
            for heads, width in sizes
        ]
        """Per layer [slots, 2 * KV, hd], hd + 4 in int8: key heads, then value heads."""

    @property
    def page_bytes(self) -> int:
        """What a page takes once it was written."""
        return sum(map(self._page_of, self.layers))

    @property
    def window_bytes(self) -> int:
        """Of that, what layers with a window take."""
        return sum(map(self._page_of, compress(self.layers, self._windowed)))

    def _page_of(self, layer_SKh: Tensor) -> int:
        return self.page_size * layer_SKh.stride(0) * layer_SKh.element_size()

    def give_back(self, runs: Iterable[Run], windowed: bool | None = None) -> None:
        """Give the memory of pages back to the system, which needs `gives_back`.

        Args:
            runs: the pages.
            windowed: of layers with a window alone, or of the others alone; None: of all.
        """
        size, all_of_them = self.page_size, zip(self.layers, self._windowed, strict=True)
        layers = [layer for layer, has in all_of_them if windowed is None or has == windowed]
        for run in runs:
            for layer_SKh in layers:
                give_back(layer_SKh, run.start * size, (run.start + run.length) * size)

    def move(self, source_N: Tensor, target_N: Tensor) -> None:
        """Copy slots to others, all read before any is written; int64 slot numbers."""
        for layer_SKh in self.layers:
            layer_SKh.index_copy_(0, target_N, layer_SKh.index_select(0, source_N))


def write(layer_SKh: Tensor, slots_T: Tensor | slice, kv_TKh: Tensor) -> None:
    """Store keys and values of one layer, rows as the store keeps them; a slice where slots are
    neighbours."""
    if isinstance(slots_T, slice):
        layer_SKh[slots_T] = kv_TKh
    else:
        layer_SKh.index_copy_(0, slots_T, kv_TKh)
