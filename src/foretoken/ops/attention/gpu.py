"""Attention by the GPU's kernels: spans cut into units of work, as numbers for one copy.

A unit is a tile of one span's rows over one split of its keys at absolute places, so how a row is
summed depends on its own place alone. `plan_rows` is the arithmetic, in numpy; whoever owns the
step's buffers copies what it gives. `GpuAttention` is for layers that run one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    UNIT_INTS,
    AttentionCall,
    AttentionInts,
    AttentionShape,
    GpuKernels,
    KVLayer,
    Partials,
)
from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow
from foretoken.ops.quantize_kv import numbers_and_scales
from foretoken.shape.memory_formula import PARTIAL_BYTES

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """The rows of some spans laid end to end; fields as in `AttentionInts`, and where each row's
    keys and values go."""

    places_T: Ints
    slots_T: Ints
    runs_T: Ints
    bases_T: Ints
    units_U: Ints
    pages_P: Ints
    tails_XJ: Ints
    lasts_T: Ints
    """Places, but of spans that see each other whole."""
    partials: int
    """Partial results that there is to be room for."""
    splits: bool
    pieces: tuple["RowPiece", ...]
    """What is run one after the other, where there is no room for the partial results of all."""


class RowPiece(NamedTuple):
    """Some rows, and their units."""

    rows: slice
    units: slice


def most_partials(kernels: GpuKernels, shape: AttentionShape, positions: int) -> int:
    """Partial results that a step has room for, at least those of a tile at a context's end."""
    each = 4 * shape.num_heads * (shape.head_dim + 2)
    rows = kernels.tile * shape.num_kv_heads // shape.num_heads
    return max(min(PARTIAL_BYTES // each, 1 << 15), rows * (positions // kernels.split + 1))


def plan_rows(
    spans: Sequence[SpanWindow],
    kernels: GpuKernels,
    shape: AttentionShape,
    most: int,
    *,
    whole: bool = False,
) -> UnitPlan:
    """The units of these spans, those with most keys first.

    Args:
        spans: laid end to end.
        kernels: their tile and split decide how rows are cut.
        shape: heads and pages.
        most: partial results that there is room for.
        whole: whether rows see all of their span, in some layers.
    """
    laid = lay_out(spans, shape.page_size)
    counts, firsts, places = laid.counts, laid.firsts, laid.places.copy()
    runs = np.full(len(places), -1)
    tails: list[list[int]] = []
    trees = np.zeros((len(spans), 3), np.int64)  # Start, first run, runs.
    for index, span in enumerate(spans):
        if span.paths is not None:
            own = slice(firsts[index], firsts[index] + span.num_tokens)
            trees[index] = span.start, len(tails), 0
            places[own] = [span.start + len(path) - 1 for path in span.paths]
            runs[own] = _branches(span.paths, tails)
            trees[index, 2] = len(tails) - trees[index, 1]
    width = max(map(len, tails), default=0)
    padded = [tail + [0] * (width - len(tail)) for tail in tails]
    lasts = places
    if whole:
        lasts = np.repeat(np.array([span.end - 1 for span in spans], np.int64), counts)
    units = _units(laid, (places, lasts), trees, kernels, shape.num_heads // shape.num_kv_heads)
    per_row = lasts // kernels.split + 1
    bases = per_row.cumsum() - per_row
    pieces = [RowPiece(slice(0, len(places)), slice(0, len(units)))]
    if per_row.sum() > most and per_row.max() > 1:
        units, pieces = _cut(units, bases, per_row.sum(), most)
        for rows, _ in pieces:
            bases[rows] -= bases[rows.start]
    keys = np.minimum(units[:, 3] - units[:, 5] * kernels.split, kernels.split)
    for _, own in pieces:
        units[own] = units[own][np.argsort(-keys[own], kind="stable")]
    return UnitPlan(
        places_T=places.astype(np.int32),
        lasts_T=lasts.astype(np.int32),
        slots_T=laid.slots.astype(np.int32),
        runs_T=runs.astype(np.int32),
        bases_T=bases.astype(np.int32),
        units_U=units.astype(np.int32),
        pages_P=laid.pages.astype(np.int32),
        tails_XJ=np.array(padded, np.int32).reshape(len(tails), width),
        partials=int((bases + per_row).max(initial=0)),
        splits=bool(per_row.max(initial=1) > 1),
        pieces=tuple(pieces),
    )


class LaidOut(NamedTuple):
    """Spans end to end, int64."""

    counts: npt.NDArray[Any]
    firsts: npt.NDArray[Any]
    """The first row of each."""
    pages: npt.NDArray[Any]
    tables: npt.NDArray[Any]
    """Where the pages of each begin."""
    places: npt.NDArray[Any]
    """Where each row is stored in its sequence, and its slot."""
    slots: npt.NDArray[Any]


def lay_out(spans: Sequence[SpanWindow], page_size: int) -> LaidOut:
    """Where the rows of these spans are stored."""
    counts = np.array([span.num_tokens for span in spans], np.int64)
    starts = np.array([span.start + span.known for span in spans], np.int64)
    firsts, inside = _runs_of(counts)
    places = np.repeat(starts, counts) + inside
    tables = np.array([0, *(len(span.page_table) for span in spans)]).cumsum()
    pages = np.fromiter(chain.from_iterable(s.page_table for s in spans), np.int64, tables[-1])
    slots = pages[np.repeat(tables[:-1], counts) + places // page_size] * page_size
    return LaidOut(counts, firsts, pages, tables[:-1], places, slots + places % page_size)


def _runs_of(counts: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Where runs of these lengths begin, end to end, and the place of each member in its run."""
    firsts = counts.cumsum() - counts
    return firsts, np.arange(counts.sum()) - np.repeat(firsts, counts)


def _branches(paths: Sequence[tuple[int, ...]], tails: list[list[int]]) -> list[int]:
    """Which tail each node stands on; a node that follows the one before it shares its tail."""
    found: list[int] = []
    for path in paths:
        if found and tails[-1] == list(path[:-1]):
            tails[-1] = list(path)
        else:
            tails.append(list(path))
        found.append(len(tails) - 1)
    return found


def _units(
    laid: LaidOut,
    rows_see: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    trees: npt.NDArray[Any],
    kernels: GpuKernels,
    group: int,
) -> npt.NDArray[Any]:
    (counts, firsts, *_), (places, lasts) = laid, rows_see
    rows = kernels.tile // group
    tiles = -(-counts // rows)
    _, number = _runs_of(tiles)
    span = np.repeat(np.arange(len(counts)), tiles)
    first = firsts[span] + number * rows
    end = np.maximum.reduceat(lasts, first) + 1
    tables, trees = laid.tables[span], trees[span]
    start = np.where(trees[:, 2] > 0, trees[:, 0], end)
    tile = np.stack(
        (
            first,
            np.minimum(rows, counts[span] - number * rows),
            start,
            end,
            tables,
            np.zeros_like(first),
            np.minimum.reduceat(places, first),
            trees[:, 1],
            trees[:, 2],
        ),
        axis=1,
    )
    splits = (end - 1) // kernels.split + 1
    units = np.repeat(tile, splits, axis=0)
    _, units[:, 5] = _runs_of(splits)
    return units


def _cut(
    units: npt.NDArray[Any], bases: npt.NDArray[Any], total: int, most: int
) -> tuple[npt.NDArray[Any], list[RowPiece]]:
    """Units in pieces of whole tiles of rows, each with `most` partial results at most."""
    first, at = units[:, 0], 0
    starts = np.unique(first)
    largest = np.diff(bases[starts], append=total).max()
    assert largest <= most, (largest, most)
    piece = bases[starts] // max(most - largest, 1)
    edges = [*starts[np.unique(piece, return_index=True)[1]].tolist(), len(bases)]
    order = np.argsort(first, kind="stable")
    units, pieces = units[order], []
    for start, end in pairwise(edges):
        count = int(((first >= start) & (first < end)).sum())
        pieces.append(RowPiece(slice(start, end), slice(at, at + count)))
        at += count
    return units, pieces


def attention_shape(geometry: Geometry) -> AttentionShape:
    """What kernels are compiled for."""
    return AttentionShape(
        num_heads=geometry.num_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        window=geometry.window or 0,
        softcap=geometry.softcap or 0.0,
        scale=geometry.score_scale,
        by_key=geometry.by_key,
    )


def layer_of(layer_SKh: Tensor) -> KVLayer:
    """A layer of a store as kernels read it."""
    if layer_SKh.dtype != torch.int8:
        return KVLayer(layer_SKh)
    numbers_SLh, scales = numbers_and_scales(layer_SKh)
    return KVLayer(numbers_SLh, scales.view(torch.float32).squeeze(-1))


def run_attention(kernels: GpuKernels, on: AttentionCall, pieces: Sequence[RowPiece]) -> None:
    """Attention of a step, piece by piece; without pieces all rows at once."""
    step = on.step
    for rows, units in pieces or (RowPiece(slice(None), slice(None)),):
        kernels.attend(on._replace(step=step._replace(units_U=step.units_U[units])))
        if step.splits:
            lasts_T = None if step.lasts_T is None else step.lasts_T[rows]
            own = step._replace(
                places_T=step.places_T[rows], bases_T=step.bases_T[rows], lasts_T=lasts_T
            )
            kernels.combine(on._replace(step=own, out_TD=on.out_TD[rows]))


@final
class GpuAttention(Attention):
    """The kernels, for layers that are called one by one: a copy a step, and memory a call."""

    def __init__(self, geometry: Geometry, kernels: GpuKernels) -> None:
        """Serve `geometry`."""
        self.geometry, self.kernels = geometry, kernels
        self.shape = attention_shape(geometry)

    def plan(self, spans: Sequence[SpanWindow]) -> Attend:
        """Units of the spans, on the device."""
        geometry, kernels = self.geometry, self.kernels
        ends = max(span.end for span in spans)
        plan = plan_rows(spans, kernels, self.shape, most_partials(kernels, self.shape, ends))
        device = geometry.device
        rows = (plan.places_T, plan.runs_T, plan.bases_T)
        parts = (*rows, plan.units_U, plan.pages_P, plan.tails_XJ)
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
        pieces = flat.split([part.size for part in parts])
        step = AttentionInts(
            places_T=pieces[0],
            runs_T=pieces[1],
            bases_T=pieces[2],
            units_U=pieces[3].view(-1, UNIT_INTS),
            pages_P=pieces[4],
            tails_XJ=pieces[5].view(plan.tails_XJ.shape),
            trees=len(plan.tails_XJ) > 0,
            splits=plan.splits,
        )

        def attend(q_THh: Tensor, layer_SKh: Tensor, sinks_H: Tensor | None = None, /) -> Tensor:
            heads, size = q_THh.shape[1:]
            out_TD = q_THh.new_empty(q_THh.shape[0], heads * size)
            partials = Partials.empty(plan.partials if plan.splits else 0, self.shape, device)
            layer = layer_of(layer_SKh)
            on = AttentionCall(q_THh, layer, self.shape, step, partials, out_TD, sinks_H)
            run_attention(kernels, on, plan.pieces)
            return out_TD

        return attend
