"""Attention written from its definition: the twin that the fast path is tested against.

Row by row over exactly the positions the row sees, so its bits cannot depend on spans, batches
or pages. Slow; used where no fast path is invariant.
"""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow
from foretoken.ops.quantize_kv import dequantize


@final
class ReferenceAttention(Attention):
    """softmax(cap(scale q k^T)) v in float32 over a row's window, one row at a time."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry

    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Slots of every span's positions."""
        slots, geometry = [self._slots(span) for span in spans], self._geometry

        def attend(q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /) -> Tensor:
            rows, at = [], 0
            for span, slots_L in zip(spans, slots, strict=True):
                kv_LKh = dequantize(layer_SKh.index_select(0, slots_L), geometry.dtype)
                for offset in range(span.num_tokens):
                    before, end = kv_LKh, span.start + offset + 1
                    if span.paths is not None:
                        path = torch.tensor(span.paths[offset], device=geometry.device)
                        before = torch.cat([kv_LKh[: span.start], kv_LKh[span.start + path]])
                        end = before.shape[0]
                    seen = before[max(0, end - (geometry.window or end)) : end]
                    rows.append(self._row(q_THh[at], seen, sinks_H))
                    at += 1
            return torch.stack(rows)

        return attend

    def _slots(self, span: SpanWindow) -> Tensor:
        size, device = self._geometry.page_size, self._geometry.device
        pages = torch.tensor(span.page_table, dtype=torch.int64, device=device)
        slots = pages[:, None] * size + torch.arange(size, device=device)
        return slots.flatten()[: span.end]

    def _row(self, q_Hh: Tensor, kv_LKh: Tensor, sinks_H: Tensor | None) -> Tensor:
        """One token's output [H * h]."""
        geometry = self._geometry
        kv = geometry.num_kv_heads
        keys_LKh, values_LKh = kv_LKh[:, :kv].float(), kv_LKh[:, kv:].float()
        q_KGh = q_Hh.float().view(geometry.group, kv, geometry.head_dim).transpose(0, 1)
        scores_KGL = (q_KGh[:, :, None] * keys_LKh.transpose(0, 1)[:, None]).sum(-1)
        scores_KGL = scores_KGL * geometry.score_scale
        if geometry.softcap is not None:
            scores_KGL = (scores_KGL / geometry.softcap).tanh() * geometry.softcap
        if sinks_H is None:
            weights_KGL = scores_KGL.softmax(dim=-1)
        else:
            sinks_KG1 = sinks_H.view(geometry.group, kv).T[..., None]
            weights_KGL = torch.cat([sinks_KG1, scores_KGL], -1).softmax(dim=-1)[..., 1:]
        out_KGh = (weights_KGL[..., None] * values_LKh.transpose(0, 1)[:, None]).sum(-2)
        out: Tensor = out_KGh.transpose(0, 1).flatten().to(q_Hh.dtype)
        return out
