"""Attention by its definition, one token at a time: gather, score, softmax, mix, in float32.

Any device, any dtype, no padding. Slow, obviously right, and invariant when asked: then the
gathered length is a multiple of a fixed block and every product has one fixed shape per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.ops.attention.base import Geometry, SpanView


@dataclass(frozen=True, slots=True)
class _TokenPlan:
    geometry: Geometry
    slots: tuple[Tensor, ...]
    """Per token the int64 slots it attends to, its own last."""

    def attend(self, q_THd: Tensor, layer_kv: Tensor) -> Tensor:
        g = self.geometry
        rows = []
        for q_Hd, slots_L in zip(q_THd, self.slots, strict=True):
            kv = layer_kv.index_select(0, slots_L).float()
            k_KLd, v_KLd = kv[:, 0].transpose(0, 1), kv[:, 1].transpose(0, 1)
            q_KGd = q_Hd.float().view(g.group, g.num_kv_heads, g.head_dim).transpose(0, 1)
            weights_KGL = (q_KGd @ k_KLd.transpose(1, 2) / g.head_dim**0.5).softmax(-1)
            rows.append((weights_KGL @ v_KLd).transpose(0, 1).reshape(-1))
        return torch.stack(rows).to(q_THd.dtype)


class ReferenceAttention:
    """The definition. A token's work depends on its own position only, so rows are invariant."""

    def __init__(self, geometry: Geometry) -> None:
        """For one model and store."""
        self._geometry = geometry

    def plan(self, spans: Sequence[SpanView]) -> _TokenPlan:
        """Slots of every token's past."""
        size = self._geometry.page_size
        offsets = torch.arange(size, device=self._geometry.device)
        slots: list[Tensor] = []
        for span in spans:
            pages = torch.tensor(span.page_table, device=self._geometry.device)
            of_sequence = (pages[:, None] * size + offsets).flatten()
            first = span.start + 1
            slots.extend(of_sequence[:end] for end in range(first, first + span.num_tokens))
        return _TokenPlan(self._geometry, tuple(slots))
