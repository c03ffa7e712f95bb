"""Trees for an attention that knows chains only: each branch is attended to as the chain it is.

The keys and values that a run of nodes sees are gathered in order of position and given to the
chain attention, which thereby does for a node the very arithmetic of plain decoding: as many bits
are kept as the chain attention keeps. Costs a copy of the keys per run and layer; steps without
trees go straight through.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.ops.attention.base import Attend, Attention, Geometry, SpanWindow

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
    """Chains by another attention, trees run by run by the same."""

    def __init__(self, chains: Attention, geometry: Geometry) -> None:
        """Let `chains` do the work."""
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

        def attend(q_THh: Tensor, layer_SKh: Tensor) -> Tensor:
            out_TD = q_THh.new_empty(q_THh.shape[0], q_THh.shape[1] * q_THh.shape[2])
            if whole is not None:
                out_TD[rows_P] = whole(q_THh[rows_P], layer_SKh)
            for run, one in zip(runs, attends, strict=True):
                part = slice(run.first, run.first + run.window.num_tokens)
                out_TD[part] = one(q_THh[part], layer_SKh.index_select(0, run.slots_L))
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
