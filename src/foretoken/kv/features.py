"""Hidden states of computed tokens, slot by slot: what feature-conditioned drafters read.

They lie under the same slots as the keys and values, so rollback, preemption, chunked prefill and
prefix hits need no second book: a token that was computed has its features, whenever a drafter
comes to ask. Knows neither models nor drafters. Costs one row of `width` values a token.
"""

import ctypes
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Self

import torch
from torch import Tensor

from foretoken.kernels.structures import FtFeatures
from foretoken.kv.free_runs import Run
from foretoken.kv.lazy_zeros import give_back, lazy_zeros

FINAL = -1
"""The point after the last norm; other points i are the residual stream before layer i."""


class FeatureStore:
    """Rows of hidden states of `num_slots` slots, taken at some points of a model."""

    def __init__(
        self,
        points: Sequence[int],
        hidden_size: int,
        num_slots: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate zeros; on a CPU the memory is only taken as slots are written.

        Args:
            points: where hidden states are taken, FINAL or the index of a layer, in the order in
                which they stand in a row.
            hidden_size: of the model.
            num_slots: as many as its KV store has.
            dtype: the model's.
            device: the model's.
        """
        assert len(set(points)) == len(points), points
        self.width = hidden_size
        self.columns = {
            point: slice(i * hidden_size, (i + 1) * hidden_size) for i, point in enumerate(points)
        }
        size = (num_slots, len(points) * hidden_size)
        self.slots_SF = lazy_zeros(size, dtype=dtype, device=device)

    def only(self, points: Collection[int]) -> Self:
        """The same rows, of which these points alone are written."""
        narrow = copy(self)
        narrow.columns = {point: at for point, at in self.columns.items() if point in points}
        return narrow

    def write(self, point: int, slots_T: Tensor | slice, x_TD: Tensor) -> None:
        """Keep the hidden states of a step's tokens, if this point is wanted."""
        columns = self.columns.get(point)
        if columns is None:
            return
        if isinstance(slots_T, slice):
            self.slots_SF[slots_T, columns] = x_TD
        else:
            self.slots_SF[:, columns].index_copy_(0, slots_T, x_TD)

    @property
    def slot_bytes(self) -> int:
        """What a token takes once it was written."""
        return self.slots_SF.stride(0) * self.slots_SF.element_size()

    def give_back(self, runs: Iterable[Run], page_size: int) -> None:
        """Give the memory of pages back to the system, which needs `gives_back`."""
        for run in runs:
            first, stop = run.start * page_size, (run.start + run.length) * page_size
            give_back(self.slots_SF, first, stop)

    def move(self, source_N: Tensor, target_N: Tensor) -> None:
        """Copy slots to others, all read before any is written; int64 slot numbers."""
        self.slots_SF.index_copy_(0, target_N, self.slots_SF.index_select(0, source_N))


class FeatureView:
    """What one drafter reads of a store: some of its points, in the drafter's own order."""

    def __init__(self, store: FeatureStore, points: Sequence[int]) -> None:
        """Read `points`, all of which `store` keeps."""
        self.width = len(points) * store.width
        self._columns = [store.columns[point] for point in points]
        self.pieces: Sequence[slice] = self._columns
        """Columns of a slot, end to end the drafter's features; as few as there are."""
        self.slots_SF = store.slots_SF
        starts = [columns.start for columns in self._columns]
        first, stop = starts[0], starts[0] + self.width
        beside = starts == list(range(first, stop, store.width))
        pieces, item = [first] if beside else starts, self.slots_SF.element_size()
        self._pieces = (ctypes.c_int64 * len(pieces))(*(item * start for start in pieces))
        if beside:
            self.pieces = (slice(first, stop),)
        self.rows_SF: Tensor | None = self.slots_SF[:, first:stop] if beside else None
        """The drafter's features of all slots as rows of the store, perhaps far apart; None: they
        do not lie side by side."""

    @property
    def dtype(self) -> torch.dtype:
        """The target's."""
        return self.slots_SF.dtype

    @property
    def in_c(self) -> FtFeatures:
        """The same as a kernel reads it, as long as this view is there."""
        item, slots_SF = self.slots_SF.element_size(), self.slots_SF
        assert slots_SF.stride(1) == 1, slots_SF.stride()
        return FtFeatures(
            slots=slots_SF.data_ptr(),
            pieces=ctypes.addressof(self._pieces),
            stride=slots_SF.stride(0) * item,
            piece_bytes=self.width * item // len(self._pieces),
            num_pieces=len(self._pieces),
        )

    def read(self, slots_N: Tensor | slice) -> Tensor:
        """Features of these slots, [N, F]; perhaps a view where slots are neighbours."""
        rows_SF = self.slots_SF if self.rows_SF is None else self.rows_SF
        if isinstance(slots_N, slice):
            rows_NF = rows_SF[slots_N]
        else:
            rows_NF = rows_SF.index_select(0, slots_N)
        if self.rows_SF is not None:
            return rows_NF.contiguous()
        return torch.cat([rows_NF[:, columns] for columns in self._columns], dim=-1)


class GapRecord:
    """Tokens whose hidden states were not kept because nobody wanted them, page by page.

    A page is known to have gaps as long as its contents stay, whoever computed them, so that a
    prefix hit inherits them.
    """

    def __init__(self, generations: Sequence[int], page_size: int) -> None:
        """No gaps; `generations` is the pool's count of how often each page changed contents."""
        self._generations = generations
        self._page_size = page_size
        self._gaps: dict[int, tuple[int, int]] = {}

    def __bool__(self) -> bool:
        return bool(self._gaps)

    def add(self, page_table: Sequence[int], start: int, end: int) -> None:
        """Places [start, end), the newest of a sequence, were computed and nothing was kept."""
        size, last = self._page_size, end - 1
        for page in page_table[start // size : last // size]:
            self._gaps[page] = self._generations[page], size
        page = page_table[last // size]
        self._gaps[page] = self._generations[page], last % size + 1

    def lose(self, pages: Iterable[int]) -> None:
        """What was kept of these pages was given up."""
        for page in pages:
            self._gaps[page] = self._generations[page], self._page_size

    def known_from(self, page_table: Sequence[int], start: int, end: int) -> int:
        """The first place in [start, end) from which on there is no gap before `end`."""
        if not self._gaps or start >= end:
            return start
        size = self._page_size
        for index in range((end - 1) // size, start // size - 1, -1):
            page = page_table[index]
            generation, behind = self._gaps.get(page, (0, 0))
            if generation == self._generations[page]:
                return max(start, min(end, index * size + behind))
        return start


class FeatureGaps:
    """What one reader of hidden states lacks: all that was recorded while it rested.

    Readers that rest together have one record, so that a step writes it once.
    """

    def __init__(self, records: Iterable[GapRecord] = ()) -> None:
        """Of these records, and those that are added to `records` later."""
        self.records = list(records)

    def __bool__(self) -> bool:
        return any(self.records)

    def known_from(self, page_table: Sequence[int], start: int, end: int) -> int:
        """The first place in [start, end) from which on there is no gap before `end`."""
        return max((one.known_from(page_table, start, end) for one in self.records), default=start)
