"""What every attention is: asked once a step for a plan, which every layer then follows.

Layout. Queries come as [T, heads, head_dim] with the heads in *group-major* order: head
g * key_value_heads + k is query g of key-value head k (models reorder their weights once, at
load). The output is [T, heads * head_dim] in the same order. Keys and values of a layer are
[slots, 2, key_value_heads, head_dim].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What attention needs to know of a model and its KV store."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Queries per key-value head."""
        return self.num_heads // self.num_kv_heads


class SpanView(Protocol):
    """Positions [start, start + num_tokens) of a sequence with the pages `page_table`."""

    @property
    def start(self) -> int:
        """First position."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many, at least 1."""
        ...

    @property
    def page_table(self) -> list[int]:
        """Pages of the sequence from position 0."""
        ...


class Plan(Protocol):
    """One step's attention, the same for every layer."""

    def attend(self, q_THd: Tensor, layer_kv: Tensor) -> Tensor:
        """Causal attention of the step's tokens to their own sequences: [T, heads * head_dim].

        The tokens' own keys and values are already written to `layer_kv`.
        """
        ...


class Attention(Protocol):
    """Makes plans."""

    def plan(self, spans: Sequence[SpanView]) -> Plan:
        """For spans laid end to end."""
        ...
