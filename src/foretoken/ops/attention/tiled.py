"""Attention through PyTorch's fused kernel, in tiles of fixed shape.

The query heads of a key head become rows of one matrix, token rows are padded to tiles of a
fixed number, and the length of the keys is rounded up and masked: then the kernel does the same
arithmetic for a token wherever it stands, as far as `choose` has measured. Spans of one tile run
together in one call; longer ones run alone, a tile per batch entry over the same keys.

Under a window the keys begin at a multiple of 512, the kernel's own block of keys, so that a
position lies in the same block whatever else is computed. Soft-capped scores and sinks, which the
kernel does not know, are computed tile by tile in float32.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.ops.attention.base import (
    Attend,
    Attention,
    Geometry,
    SpanWindow,
    contiguous_start,
)
from foretoken.ops.quantize_kv import dequantize

_KEY_BLOCK = 512
_CAPPED_TOKENS = 256
"""Most tokens of a span whose soft-capped scores are computed at once."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """Token rows per tile, and what the number of keys is rounded up to. 0 rows: the span's own
    number, so nothing is padded and nothing is promised about bits."""

    rows: int
    key_multiple: int
    by_position: bool = False
    """A token's keys run to the next multiple after its own position, never further: spans are
    cut there. Then the kernel need not be invariant to the number of keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Tiles that run in one call."""

    tiles: int
    rows: int
    shared_keys: bool
    """All tiles read the same keys."""
    slots: slice | None
    """The keys are neighbours in the store."""
    pages: Tensor | None
    """int64 [spans, pages] otherwise."""
    num_keys: int
    """Keys that are attended to, from the first on; whole pages may hold more."""
    mask: Tensor | None
    """[tiles, 1, rows * G, L], 0 or -inf."""
    take: Tensor | slice
    """Tokens of the step that this group serves."""
    place: Tensor | slice
    """Where they stand among its tiles * rows rows."""


@final
class TiledAttention(Attention):
    """F.scaled_dot_product_attention over tiles."""

    def __init__(self, geometry: Geometry, tiling: Tiling) -> None:
        """Serve `geometry`; `tiling` decides the shapes."""
        self._geometry = geometry
        self.tiling = tiling
        self._key_block = math.lcm(_KEY_BLOCK, geometry.page_size)
        cuts = [tiling.key_multiple] if tiling.by_position else []
        if geometry.window is not None:
            cuts.append(self._key_block)
        if geometry.softcap is not None or geometry.has_sinks:
            cuts.append(_CAPPED_TOKENS)
        self._cut = min(cuts, default=None)
        """Spans are cut at multiples of this position."""

    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Group the spans into calls; masks and indices are made here, once a step."""
        assert all(span.paths is None for span in spans), "trees are not tiled"
        groups = self._groups(spans)
        geometry = self._geometry

        def attend(q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /) -> Tensor:
            if len(groups) == 1:
                return _attend(geometry, groups[0], q_THh, (layer_SKh, sinks_H))
            out_TD = q_THh.new_empty(q_THh.shape[0], geometry.num_heads * geometry.head_dim)
            for group in groups:
                part = q_THh[group.take]
                out_TD[group.take] = _attend(geometry, group, part, (layer_SKh, sinks_H))
            return out_TD

        return attend

    def _groups(self, spans: Sequence[SpanWindow]) -> list[_Group]:
        limit = self.tiling.rows or 8
        short: list[tuple[SpanWindow, int]] = []
        groups, at = [], 0
        for span in spans:
            for window in self._sections(span):
                if window.num_tokens <= limit:
                    short.append((window, at))
                else:
                    groups.append(self._long(window, at))
                at += window.num_tokens
        for alike in self._alike(short):
            span, at = alike[0]
            groups.append(self._long(span, at) if len(alike) == 1 else self._together(alike))
        return groups

    def _sections(self, span: SpanWindow) -> list[SpanWindow]:
        """The span, cut so that no part has keys that are far from most of its tokens, and by
        position all tokens of a part have the same ones."""
        multiple, start = self._cut, span.start
        if multiple is None or (span.end - 1) // multiple == start // multiple:
            return [span]
        sections = []
        while start < span.end:
            end = min(span.end, (start // multiple + 1) * multiple)
            sections.append(SpanWindow(start, end - start, span.page_table))
            start = end
        return sections

    def _alike(self, short: list[tuple[SpanWindow, int]]) -> list[list[tuple[SpanWindow, int]]]:
        """Which of these can run in one call."""
        if not self.tiling.by_position or len(short) < 2:
            return [short] if short else []
        alike: dict[int, list[tuple[SpanWindow, int]]] = {}
        for span, at in short:
            num_keys = _round_up(span.end, self.tiling.key_multiple) - self._first_key(span)
            alike.setdefault(num_keys, []).append((span, at))
        return list(alike.values())

    def _first_key(self, span: SpanWindow) -> int:
        """Where the keys of the span begin: a multiple of the key block, and of a page; the same
        for all tokens between two cuts."""
        if self._geometry.window is None:
            return 0
        assert self._cut is not None, "spans are cut under a window"
        seen = max(0, span.start // self._cut * self._cut - self._geometry.window + 1)
        return seen // self._key_block * self._key_block

    def _long(self, span: SpanWindow, at: int) -> _Group:
        """One span alone, in as many tiles as it needs."""
        rows = self.tiling.rows or span.num_tokens
        tiles = -(-span.num_tokens // rows)
        num_keys = _round_up(span.end, self.tiling.key_multiple) - self._first_key(span)
        slots, pages = self._keys([span], num_keys)
        mask = None
        if rows > 1 or num_keys != span.end or self._geometry.window is not None:
            mask = self._mask([span], [tiles], rows, num_keys)
        return _Group(
            tiles=tiles,
            rows=rows,
            shared_keys=tiles > 1,
            slots=slots,
            pages=pages,
            num_keys=num_keys,
            mask=mask,
            take=slice(at, at + span.num_tokens),
            place=slice(0, span.num_tokens),
        )

    def _together(self, short: list[tuple[SpanWindow, int]]) -> _Group:
        """Spans of one tile each, in one call over as many keys as the one with most has."""
        device = self._geometry.device
        spans = [span for span, _ in short]
        rows = self.tiling.rows or max(span.num_tokens for span in spans)
        num_keys = max(
            _round_up(span.end, self.tiling.key_multiple) - self._first_key(span) for span in spans
        )
        _, pages = self._keys(spans, num_keys)
        take = [at + i for span, at in short for i in range(span.num_tokens)]
        place = [n * rows + i for n, span in enumerate(spans) for i in range(span.num_tokens)]
        return _Group(
            tiles=len(spans),
            rows=rows,
            shared_keys=False,
            slots=None,
            pages=pages,
            num_keys=num_keys,
            mask=self._mask(spans, [1] * len(spans), rows, num_keys),
            take=torch.tensor(take, device=device),
            place=torch.tensor(place, device=device),
        )

    def _keys(self, spans: list[SpanWindow], num_keys: int) -> tuple[slice | None, Tensor | None]:
        """Where the keys are: neighbours for a single span if possible, else page numbers."""
        size = self._geometry.page_size
        if len(spans) == 1:
            table = self._pages(spans[0])
            first = contiguous_start(table, len(table))
            if first is not None:
                return slice(first * size, first * size + num_keys), None
        width = -(-num_keys // size)
        tables = [_fit(self._pages(span), width) for span in spans]
        return None, torch.tensor(tables, dtype=torch.int64, device=self._geometry.device)

    def _pages(self, span: SpanWindow) -> list[int]:
        """The pages from the first key of the span to its last token."""
        size = self._geometry.page_size
        return span.page_table[self._first_key(span) // size : -(-span.end // size)]

    def _mask(self, spans: list[SpanWindow], tiles: list[int], rows: int, num_keys: int) -> Tensor:
        """0 where a row sees a key. Padding rows see what the span's first token sees."""
        geometry = self._geometry
        last: list[int] = []
        for span, count in zip(spans, tiles, strict=True):
            first = self._first_key(span)
            last.extend(range(span.start - first, span.end - first))
            last.extend([span.start - first] * (count * rows - span.num_tokens))
        last_N1 = torch.tensor(last, device=geometry.device)[:, None]
        keys_L = torch.arange(num_keys, device=geometry.device)
        unseen_NL = keys_L > last_N1
        if geometry.window is not None:
            unseen_NL |= keys_L <= last_N1 - geometry.window
        mask_NL = torch.zeros(unseen_NL.shape, dtype=geometry.dtype, device=geometry.device)
        mask_NL.masked_fill_(unseen_NL, -torch.inf)
        mask = mask_NL.repeat_interleave(geometry.group, 0)
        return mask.view(sum(tiles), 1, rows * geometry.group, num_keys)


def _attend(
    geometry: Geometry, group: _Group, q_THh: Tensor, layer: tuple[Tensor, Tensor | None]
) -> Tensor:
    """Attention of one group's tokens, [T, H * h]; `layer`: its store and its sinks."""
    layer_SKh, sinks_H = layer
    kv, heads, size = geometry.num_kv_heads, geometry.num_heads, geometry.head_dim
    tiles, rows = group.tiles, group.rows
    if q_THh.shape[0] != tiles * rows or isinstance(group.place, Tensor):
        padded = q_THh.new_zeros(tiles * rows, heads, size)
        padded[group.place] = q_THh
        q_THh = padded
    q = q_THh.reshape(tiles, rows * geometry.group, kv, size).transpose(1, 2)
    if group.slots is not None:
        kv_BLKh = layer_SKh[group.slots][None]
    else:
        assert group.pages is not None, "keys are neighbours or have pages"
        kv_BLKh = _gather(layer_SKh, group.pages, geometry)[:, : group.num_keys]
    kv_BLKh = dequantize(kv_BLKh, geometry.dtype)
    keys, values = kv_BLKh[:, :, :kv].transpose(1, 2), kv_BLKh[:, :, kv:].transpose(1, 2)
    if geometry.softcap is not None or sinks_H is not None:
        out = _by_scores(geometry, group, (q, keys, values), sinks_H)
    else:
        if group.shared_keys:
            keys, values = keys.expand(tiles, -1, -1, -1), values.expand(tiles, -1, -1, -1)
        out = F.scaled_dot_product_attention(
            q, keys, values, attn_mask=group.mask, scale=geometry.score_scale
        )
    out_ND = out.transpose(1, 2).reshape(tiles * rows, heads * size)
    return out_ND[group.place]


def _by_scores(
    geometry: Geometry,
    group: _Group,
    q_keys_values: tuple[Tensor, Tensor, Tensor],
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with soft-capped scores or sinks, a tile at a time: every call has the same shape.

    Args:
        geometry: its softcap, and whether there is any.
        group: for the mask.
        q_keys_values: queries [tiles, K, rows * G, h]; keys and values, each [tiles, K, L, h], or
            [1, K, L, h] if all tiles read the same.
        sinks_H: as for `Attend`.
    """
    q = q_keys_values[0]
    keys, values = (part.float().contiguous() for part in q_keys_values[1:])
    sinks = None
    if sinks_H is not None:
        # [K, rows * G, 1]: the heads of a row lie side by side.
        by_key = sinks_H.view(geometry.group, geometry.num_kv_heads).T
        sinks = by_key.repeat(1, q.shape[2] // geometry.group)[..., None]
    out = []
    for tile in range(group.tiles):
        at = tile if keys.shape[0] > 1 else 0
        scores = torch.bmm(q[tile].float() * geometry.score_scale, keys[at].transpose(1, 2))
        if geometry.softcap is not None:
            scores = scores.div_(geometry.softcap).tanh_().mul_(geometry.softcap)
        if group.mask is not None:
            scores += group.mask[tile]
        if sinks is None:
            weights = scores.softmax(dim=-1)
        else:
            # The first: its place does not depend on the number of keys.
            weights = torch.cat([sinks, scores], -1).softmax(dim=-1)[..., 1:].contiguous()
        out.append(torch.bmm(weights, values[at]))
    return torch.stack(out).to(q.dtype)


def _gather(layer_SKh: Tensor, pages: Tensor, geometry: Geometry) -> Tensor:
    """Keys and values of page tables [B, P] as [B, P * page_size, 2 * K, h]."""
    num_pages = layer_SKh.shape[0] // geometry.page_size
    by_page = layer_SKh[: num_pages * geometry.page_size].view(num_pages, -1)
    found = by_page.index_select(0, pages.flatten())
    return found.view(pages.shape[0], -1, *layer_SKh.shape[1:])


def _fit(page_table: list[int], width: int) -> list[int]:
    """The table cut or filled to `width`; what the filling holds is masked."""
    if len(page_table) >= width:
        return page_table[:width]
    return page_table + [page_table[0]] * (width - len(page_table))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
