"""Attention through PyTorch's fused kernel, over views of the KV store where pages allow it.

The query heads of a key-value head become query rows, so that grouped heads cost no copies of
keys. With a `Tiling` a token's result is the same bits whatever else is in the step: its keys
run to the next multiple of `block` after its own position (a function of the position alone),
and it is one row of a tile of fixed size. Tiles are a batch; the kernel treats its items apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.ops.attention.base import Geometry, SpanView
from foretoken.ops.attention.mask import MaskTable

_PLAIN_ROWS = 8
"""Tile rows kept in the mask table when no tiling is asked for."""
_PLAIN_SECTION = 128
"""Longest section without a tiling: skips most of the masked half of a prefill."""


class Tiling(NamedTuple):
    """Fixed shapes of an invariant kernel."""

    rows: int
    """Tokens of a tile."""
    block: int
    """Key lengths are multiples of this; at most the store's slack."""


@dataclass(frozen=True, slots=True)
class _Section:
    """Consecutive tokens of one span that attend to equally many slots."""

    first: int
    """Row of the step's tokens."""
    num_tokens: int
    num_tiles: int
    length: int
    """Keys, those beyond the tokens' own positions masked."""
    slot: int
    """Where the keys start in the store, if they lie side by side."""
    slots_L: Tensor | None
    """int64, where each key lies, if not."""
    mask: Tensor | None
    q_pad: Tensor | None
    """[tiles * rows, heads, head_dim], if the tokens do not fill the tiles."""


@dataclass(frozen=True, slots=True)
class FastPlan:
    """Sections of all spans, in order."""

    geometry: Geometry
    sections: tuple[_Section, ...]

    def attend(self, q_THd: Tensor, layer_kv: Tensor) -> Tensor:
        """As `Plan`."""
        if len(self.sections) == 1:
            return self._attend(q_THd, layer_kv, self.sections[0])
        return torch.cat(
            [
                self._attend(q_THd[s.first : s.first + s.num_tokens], layer_kv, s)
                for s in self.sections
            ]
        )

    def _attend(self, q_THd: Tensor, layer_kv: Tensor, s: _Section) -> Tensor:
        g = self.geometry
        if s.q_pad is not None:
            s.q_pad[: s.num_tokens] = q_THd
            q_THd = s.q_pad
        shape = (s.num_tiles, -1, g.num_kv_heads, g.head_dim)
        q_NKRd = q_THd.reshape(shape).transpose(1, 2)
        if s.slots_L is None:
            kv = layer_kv[s.slot : s.slot + s.length]
        else:
            kv = layer_kv.index_select(0, s.slots_L)
        k_NKLd, v_NKLd = kv.permute(1, 2, 0, 3)[:, None].expand(-1, s.num_tiles, -1, -1, -1)
        out_NKRd = _fused(q_NKRd, k_NKLd, v_NKLd, s.mask)
        out = out_NKRd.transpose(1, 2).reshape(-1, g.num_heads * g.head_dim)
        return out[: s.num_tokens]


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    if q.device.type == "cpu":
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out: Tensor = run(q, k, v, 0.0, False, attn_mask=mask)[0]
        return out
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class FastAttention:
    """Plans for one model and store."""

    def __init__(self, geometry: Geometry, tiling: Tiling | None) -> None:
        """Without a tiling: exact lengths and no padding, faster, invariant to nothing."""
        self._geometry = geometry
        self._tiling = tiling
        self._masks = MaskTable(
            tiling.rows if tiling else _PLAIN_ROWS,
            geometry.group,
            dtype=geometry.dtype,
            device=geometry.device,
        )

    def plan(self, spans: Sequence[SpanView]) -> FastPlan:
        """As `Attention`."""
        sections: list[_Section] = []
        first = 0
        for span in spans:
            sections.extend(self._sections(span, first))
            first += span.num_tokens
        return FastPlan(self._geometry, tuple(sections))

    def _sections(self, span: SpanView, first: int) -> list[_Section]:
        """Split at multiples of the block, so that a token's keys depend on its position only."""
        block = self._tiling.block if self._tiling else _PLAIN_SECTION
        end = span.start + span.num_tokens
        if self._tiling is None and span.num_tokens <= block:
            return [self._plain(span, span.start, end, first)]
        make = self._tiled if self._tiling else self._plain
        sections, start = [], span.start
        while start < end:
            stop = min(end, (start // block + 1) * block)
            sections.append(make(span, start, stop, first + start - span.start))
            start = stop
        return sections

    def _plain(self, span: SpanView, start: int, stop: int, first: int) -> _Section:
        rows = stop - start
        mask = None
        if 1 < rows <= self._masks.rows:
            mask = self._masks.tile(start, stop, rows)[None, None]
        elif rows > 1:
            mask = self._wide_mask(start, stop)
        slot, slots_L = self._locate(span.page_table, stop)
        return _Section(first, rows, 1, stop, slot, slots_L, mask, None)

    def _wide_mask(self, start: int, stop: int) -> Tensor:
        """[1, 1, (stop - start) * group, stop]."""
        g = self._geometry
        keys = torch.arange(stop, device=g.device)
        mask = torch.zeros(stop - start, stop, dtype=g.dtype, device=g.device)
        mask.masked_fill_(keys > keys[start:, None], float("-inf"))
        return mask.repeat_interleave(g.group, 0)[None, None]

    def _tiled(self, span: SpanView, start: int, stop: int, first: int) -> _Section:
        assert self._tiling is not None
        g, tiling = self._geometry, self._tiling
        length = -(-stop // tiling.block) * tiling.block
        tiles = -(-(stop - start) // tiling.rows)
        q_pad = None
        if tiles * tiling.rows != stop - start:
            size = (tiles * tiling.rows, g.num_heads, g.head_dim)
            q_pad = torch.zeros(size, dtype=g.dtype, device=g.device)
        mask = self._masks.tiles(start, length, tiles)
        slot, slots_L = self._locate(span.page_table, length)
        return _Section(first, stop - start, tiles, length, slot, slots_L, mask, q_pad)

    def _locate(self, page_table: list[int], length: int) -> tuple[int, Tensor | None]:
        """Slot of the first key if `length` keys lie side by side, else the slots of all."""
        size = self._geometry.page_size
        count = min(-(-length // size), len(page_table))
        pages = page_table[:count]
        if pages[-1] - pages[0] == count - 1 and pages == list(range(pages[0], pages[0] + count)):
            return pages[0] * size, None
        pages_P = torch.tensor(pages, device=self._geometry.device)
        offsets = torch.arange(size, device=self._geometry.device)
        slots_L = (pages_P[:, None] * size + offsets).flatten()
        missing = length - slots_L.shape[0]
        if missing > 0:
            slots_L = torch.cat([slots_L, slots_L[:1].expand(missing)])
        return 0, slots_L[:length]
