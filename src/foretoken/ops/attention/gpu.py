"""Attention by the GPU's kernels: spans cut into units of work, as numbers for one copy.

A unit is a tile of one span's rows over one split of its keys at absolute places, so how a row is
summed depends on its own place alone. `plan_rows` is the arithmetic, in numpy; whoever owns the
step's buffers copies what it gives. `GpuAttention` is for layers that run one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    UNIT_INTS,
    AttentionInts,
    AttentionShape,
    GpuKernels,
    KVLayer,
    Partials,
)
from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow
from foretoken.shape.memory_formula import KV_SCALE_BYTES

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsPlan:
    """The rows of some spans laid end to end; fields as in `AttentionInts`, and where each row's
    keys and values go."""

    places_T: Ints
    slots_T: Ints
    runs_T: Ints
    bases_T: Ints
    units_U: Ints
    pages_P: Ints
    tails_XJ: Ints
    partials: int
    """Partial results of all rows."""
    splits: bool


def plan_rows(
    spans: Sequence[SpanWindow], kernels: GpuKernels, group: int, page_size: int
) -> RowsPlan:
    """The units of these spans, those with most keys first.

    Args:
        spans: laid end to end.
        kernels: their tile and split decide how rows are cut.
        group: query heads of a key head.
        page_size: slots of a page.
    """
    counts = np.array([span.num_tokens for span in spans])
    starts = np.array([span.start + span.known for span in spans])
    firsts, inside = _runs_of(counts)
    stored = np.repeat(starts, counts) + inside
    tables = np.array([0, *(len(span.page_table) for span in spans)]).cumsum()
    pages = np.fromiter(chain.from_iterable(s.page_table for s in spans), np.int64, tables[-1])
    slots = pages[np.repeat(tables[:-1], counts) + stored // page_size] * page_size
    places, runs = stored.copy(), np.full(len(stored), -1)
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
    units = _units(counts, firsts, places, (tables[:-1], trees), kernels, group)
    per_row = places // kernels.split + 1
    bases = per_row.cumsum() - per_row
    return RowsPlan(
        places_T=places.astype(np.int32),
        slots_T=(slots + stored % page_size).astype(np.int32),
        runs_T=runs.astype(np.int32),
        bases_T=bases.astype(np.int32),
        units_U=units.astype(np.int32),
        pages_P=pages.astype(np.int32),
        tails_XJ=np.array(padded, np.int32).reshape(len(tails), width),
        partials=int(per_row.sum()),
        splits=bool(per_row.max(initial=1) > 1),
    )


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
    counts: npt.NDArray[Any],
    firsts: npt.NDArray[Any],
    places: npt.NDArray[Any],
    about: tuple[npt.NDArray[Any], npt.NDArray[Any]],
    kernels: GpuKernels,
    group: int,
) -> npt.NDArray[Any]:
    rows = kernels.tile // group
    tiles = -(-counts // rows)
    _, number = _runs_of(tiles)
    span = np.repeat(np.arange(len(counts)), tiles)
    first = firsts[span] + number * rows
    end = np.maximum.reduceat(places, first) + 1
    tables, trees = (each[span] for each in about)
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
    keys = np.minimum(units[:, 3] - units[:, 5] * kernels.split, kernels.split)
    return units[np.argsort(-keys, kind="stable")]


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
    )


def layer_of(layer_SKh: Tensor) -> KVLayer:
    """A layer of a store as kernels read it."""
    if layer_SKh.dtype != torch.int8:
        return KVLayer(layer_SKh)
    scales = layer_SKh[..., -KV_SCALE_BYTES:].view(torch.float32).squeeze(-1)
    return KVLayer(layer_SKh[..., :-KV_SCALE_BYTES], scales)


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
        plan = plan_rows(spans, kernels, geometry.group, geometry.page_size)
        device = geometry.device
        parts = (plan.places_T, plan.runs_T, plan.bases_T, plan.units_U, plan.pages_P, plan.tails_XJ)
        flat = torch.from_numpy(np.concatenate([part.ravel() for part in parts])).to(device)
        pieces = flat.split([part.size for part in parts])
        step = AttentionInts(
            *pieces[:3],
            pieces[3].view(-1, UNIT_INTS),
            pieces[4],
            pieces[5].view(plan.tails_XJ.shape),
            trees=len(plan.tails_XJ) > 0,
            splits=plan.splits,
        )

        def attend(q_THh: Tensor, layer_SKh: Tensor) -> Tensor:
            heads, size = q_THh.shape[1:]
            out_TD = q_THh.new_empty(q_THh.shape[0], heads * size)
            partials = Partials.empty(plan.partials if plan.splits else 0, self.shape, device)
            kernels.attend(q_THh, layer_of(layer_SKh), self.shape, step, partials, out_TD)
            if plan.splits:
                kernels.combine(partials, self.shape, step, out_TD)
            return out_TD

        return attend
