"""Which of PyTorch's ways to do attention to use for these heads on this machine, by measurement.

It is measured at load. A tiling is taken only if random spans and prompt chunks give,
row by row, the bits of one-token decoding, alone and in batches. Nothing is assumed about the
version of PyTorch's kernel or the processor.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import final

import torch
from torch import Tensor

from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow
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
_ROOM = 512
"""Gathered keys are filled up to a multiple of this, which chain attentions may read and mask."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens of a tree that follow one another on a branch."""

    first: int
    """Number of its first token among the step's."""
    window: SpanWindow
    """The branch as a chain over gathered keys."""
    slots_L: Tensor
    """Where those are kept, int64; filled up with the first."""


@final
class BranchAttention(Attention):
    """Chains by another attention, trees run by run by the same: each branch as the chain it is.

    The keys and values that a run of nodes sees are gathered in order of position and given to the
    chain attention, which thereby does for a node the very arithmetic of plain decoding. Costs a
    copy of the keys per run and layer; steps without trees go straight through.
    """

    def __init__(self, chains: Attention, geometry: Geometry) -> None:
        self._chains = chains
        self._geometry = geometry

    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Prepare the chains together and every run of a tree alone."""
        if all(span.paths is None for span in spans):
            return self._chains.plan(spans)
        plain: list[SpanWindow] = []
        rows: list[int] = []
        runs: list[_Run] = []
        at = 0
        for span in spans:
            if span.paths is None:
                plain.append(span)
                rows.extend(range(at, at + span.num_tokens))
            else:
                runs.extend(self._runs(span, span.paths, at))
            at += span.num_tokens
        attends = [self._chains.plan([run.window]) for run in runs]
        rows_P = torch.tensor(rows, dtype=torch.int64, device=self._geometry.device)
        whole = self._chains.plan(plain) if plain else None

        def attend(q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /) -> Tensor:
            out_TD = q_THh.new_empty(q_THh.shape[0], q_THh.shape[1] * q_THh.shape[2])
            if whole is not None:
                out_TD[rows_P] = whole(q_THh[rows_P], layer_SKh, sinks_H)
            for run, one in zip(runs, attends, strict=True):
                part = slice(run.first, run.first + run.window.num_tokens)
                out_TD[part] = one(q_THh[part], layer_SKh.index_select(0, run.slots_L), sinks_H)
            return out_TD

        return attend

    def _runs(self, span: SpanWindow, paths: Sequence[tuple[int, ...]], at: int) -> list[_Run]:
        """The span's tokens, cut where one does not follow the one before it."""
        starts = [i for i, path in enumerate(paths) if i == 0 or path[:-1] != paths[i - 1]]
        ends = [*starts[1:], len(paths)]
        return [
            self._run(span, paths[last - 1], first, last, at)
            for first, last in zip(starts, ends, strict=True)
        ]

    def _run(self, span: SpanWindow, path: tuple[int, ...], first: int, last: int, at: int) -> _Run:
        """Tokens [first, last) of the span, the last of which stands at the end of `path`."""
        size, count = self._geometry.page_size, last - first
        places = [*range(span.start), *(span.start + index for index in path)]
        slots = [span.page_table[place // size] * size + place % size for place in places]
        step = math.lcm(_ROOM, size)
        room = -(-len(slots) // step) * step
        filled = slots + slots[:1] * (room - len(slots))
        pages = list(range(room // size))
        return _Run(
            first=at + first,
            window=SpanWindow(len(slots) - count, count, pages),
            slots_L=torch.tensor(filled, dtype=torch.int64, device=self._geometry.device),
        )


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
    probe = AttentionProbe(geometry)
    for tiling in TILINGS:
        if probe.is_invariant(TiledAttention(geometry, tiling)):
            return tiling
    return None


class AttentionProbe:
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
        self._sinks_H = None
        if geometry.has_sinks:
            self._sinks_H = torch.randn(geometry.num_heads, generator=generator).to(geometry.device)
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
            attend = attention.plan([window])
            rows.append(attend(self._q_THh[at : at + length], self._layer_SKh, self._sinks_H))
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
            found = attention.plan(windows)(q_THh, self._layer_SKh, self._sinks_H)
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
