"""What every attention is: planned once a step, then called once a layer.

Query heads come in group-major order: head g * K + k is query g of key head k (models reorder
their weights once, at load), so that all queries of a key head are rows of one matrix without a
copy; on a GPU models leave them by key head. The output is in the same order.

Shape letters: T tokens of the step, H query heads, K key heads, h head size (in an int8 store: its
scale too), S slots of the store.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Attend(Protocol):
    """A step's attention, for the spans it was planned for."""

    def __call__(
        self, q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /
    ) -> Tensor:
        """[T, H * h].

        Args:
            q_THh: queries.
            layer_SKh: the store of a layer.
            sinks_H: float32, of a geometry that `has_sinks`: a score of each head that shares the
                softmax with those of its keys, unscaled and uncapped, and has no value.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Heads, type and kind of attention; what a kernel's choice of code path depends on."""

    num_heads: int
    """Query heads that read the key heads here."""
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device
    window: int | None = None
    """Positions a token sees, its own included: (p - window, p]. None: all up to its own."""
    softcap: float | None = None
    """Scaled scores become softcap * tanh(scores / softcap) before the mask. None: they stay."""
    scale: float | None = None
    """What q k^T is multiplied with; None: head_dim ** -0.5."""
    kv_store_dtype: torch.dtype | None = None
    """Type of stored keys and values: int8 (ops.quantize_kv), read as numbers of `dtype`.
    None: `dtype`."""
    has_sinks: bool = False
    """Whether each call is given sinks."""
    by_key: bool = False
    """Of `GpuAttention` alone: the queries of a key head stand side by side, as in checkpoints, so
    that some key heads are neighbouring inputs of the matrix that follows."""
    first_kv_head: int = 0
    """Number in the model of the first key head here, where a device has only some of them."""

    @property
    def kv_heads(self) -> range:
        """Numbers in the model of the key heads here."""
        return range(self.first_kv_head, self.first_kv_head + self.num_kv_heads)

    @property
    def score_scale(self) -> float:
        """What q k^T is multiplied with."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def store_dtype(self) -> torch.dtype:
        """Type of keys and values in the store."""
        return self.dtype if self.kv_store_dtype is None else self.kv_store_dtype

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class SpanWindow:
    """One span: its tokens are stored at places [start, start + num_tokens) of these pages, behind
    what is already known of a tree."""

    start: int
    num_tokens: int
    page_table: list[int]
    paths: tuple[tuple[int, ...], ...] | None = None
    """In a tree of drafts: for each token the indices in the span of its ancestors in order of
    depth, itself last. It stands at start + its depth and sees, of the span, its path only; keys
    are still stored in the order of the span. None: a chain, token i at start + i."""
    known: int = 0
    """Tokens of the tree that stand before these in the store, and in the indices of paths: token i
    is stored at place start + known + i. Of a chain: 0."""

    @property
    def end(self) -> int:
        """Positions that the last token sees."""
        return self.start + self.known + self.num_tokens


class Attention(ABC):
    """Causal attention of spans over their own pages, as their Geometry says."""

    @abstractmethod
    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Prepare a step whose tokens are those of `spans`, laid end to end."""


def contiguous_start(page_table: list[int], num_pages: int) -> int | None:
    """First page if the leading `num_pages` pages are neighbours in order, else None."""
    first = page_table[0]
    if page_table[num_pages - 1] != first + num_pages - 1:
        return None
    if num_pages > 2 and page_table[:num_pages] != list(range(first, first + num_pages)):
        return None
    return first
