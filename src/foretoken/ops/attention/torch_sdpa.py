"""Which of PyTorch's ways to do attention to use for these heads on this machine, by measurement.

It is measured at load. A tiling is taken only if random spans and prompt chunks give,
row by row, the bits of one-token decoding, alone and in batches. Nothing is assumed about the
version of PyTorch's kernel or the processor.
"""

import random
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from foretoken.ops.attention.base import Attention, Geometry, SpanWindow
from foretoken.ops.attention.branches import BranchAttention
from foretoken.ops.attention.reference import ReferenceAttention
from foretoken.ops.attention.tiled import TiledAttention, Tiling
from foretoken.ops.quantize_kv import quantize_kv

TILE_ROWS = 8
TILINGS = (
    Tiling(TILE_ROWS, 64),
    Tiling(TILE_ROWS, 64, by_position=True),
    Tiling(TILE_ROWS, 256),
    Tiling(TILE_ROWS, 512),
)
"""In order of preference: a free number of keys lets sequences of any length share a call."""
_POSITIONS = 640
_WINDOW, _WINDOW_POSITIONS = 100, 760
"""A longer window is probed as one of 100: enough for keys that begin at 0, at 512 and between."""


def torch_attention(geometry: Geometry, *, batch_invariant: bool) -> Attention:
    """The fastest by PyTorch; under `batch_invariant` the fastest that keeps the bits."""
    if not batch_invariant:
        return BranchAttention(TiledAttention(geometry, Tiling(rows=0, key_multiple=1)), geometry)
    probed = geometry
    if geometry.window is not None:
        probed = replace(geometry, window=min(geometry.window, _WINDOW))
    tiling = _invariant_tiling(probed, torch.get_num_threads())
    if tiling is None:
        return ReferenceAttention(geometry)
    return BranchAttention(TiledAttention(geometry, tiling), geometry)


@cache
def _invariant_tiling(geometry: Geometry, num_threads: int) -> Tiling | None:
    """The first tiling that keeps the bits with this many threads; None: none does."""
    probe = _Probe(geometry)
    for tiling in TILINGS:
        if probe.is_invariant(TiledAttention(geometry, tiling)):
            return tiling
    return None


class _Probe:
    """Random queries, keys and values of one sequence, and of a neighbour."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        self._positions = _POSITIONS if geometry.window is None else _WINDOW_POSITIONS
        generator = torch.Generator().manual_seed(0)
        pages = -(-(self._positions + 1024) // geometry.page_size)
        slots = 2 * pages * geometry.page_size + 1024

        def randn(*shape: int) -> Tensor:
            values = torch.randn(*shape, generator=generator)
            return values.to(geometry.device, geometry.dtype)

        self._q_THh = randn(self._positions, geometry.num_heads, geometry.head_dim)
        kv_SKh = randn(slots, 2 * geometry.num_kv_heads, geometry.head_dim)
        self._layer_SKh = quantize_kv(kv_SKh, geometry.store_dtype)
        self._table = list(range(pages))
        self._scattered = list(range(pages, 2 * pages))
        random.Random(0).shuffle(self._scattered)
        size = geometry.page_size
        for source, copy in zip(self._table, self._scattered, strict=True):
            kept = self._layer_SKh[source * size : (source + 1) * size]
            self._layer_SKh[copy * size : (copy + 1) * size] = kept

    @torch.inference_mode()
    def is_invariant(self, attention: Attention) -> bool:
        """Whether all ways of cutting the sequence give the bits of one token at a time."""
        expected = self._run(attention, [self._positions], self._table)
        draw = random.Random(1)
        chunks = _cut(draw, self._positions, [9, 33, 100, 17, 200])
        spans = _cut(draw, self._positions, [5, 6, 8, 3, 2, 4, 7])
        scattered = self._run(attention, chunks, self._scattered)
        if not torch.equal(scattered, expected) or not self._in_batches(attention, expected):
            return False
        cuts = (chunks, spans, [1] * self._positions)
        return all(torch.equal(self._run(attention, c, self._table), expected) for c in cuts)

    def _run(self, attention: Attention, lengths: list[int], table: list[int]) -> Tensor:
        rows, at = [], 0
        for length in lengths:
            window = SpanWindow(at, length, table)
            rows.append(attention.plan([window])(self._q_THh[at : at + length], self._layer_SKh))
            at += length
        return torch.cat(rows)

    def _in_batches(self, attention: Attention, expected: Tensor) -> bool:
        """Spans of many places of the sequence in one call."""
        draw = random.Random(2)
        for _ in range(12):
            windows = []
            for _ in range(draw.randint(2, 16)):
                start = draw.randrange(self._positions - 9)
                length = draw.choice([1, 1, 2, 6, 9])
                table = draw.choice([self._table, self._scattered])
                windows.append(SpanWindow(start, length, table))
            index = torch.cat([torch.arange(w.start, w.end) for w in windows])
            q_THh = self._q_THh[index.to(self._q_THh.device)]
            found = attention.plan(windows)(q_THh, self._layer_SKh)
            if not torch.equal(found, expected[index.to(expected.device)]):
                return False
        return True


def _cut(draw: random.Random, total: int, lengths: list[int]) -> list[int]:
    """Random pieces of these lengths that add up to `total`."""
    pieces: list[int] = []
    left = total
    while left:
        piece = min(draw.choice(lengths), left)
        pieces.append(piece)
        left -= piece
    return pieces
