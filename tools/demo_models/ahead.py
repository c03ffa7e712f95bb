"""Batches made by other processes before they are asked for: a GPU is faster than one of them.

Owns those processes. It knows nothing of what is in a batch. Invariant: the batches are those that
would have been made when asked for.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tools.demo_models.batches import Batch, TrainingData

MADE_AHEAD = 8
"""Batches that each process is ahead at most."""


class _Kind(NamedTuple):
    """What the batches of a stage have in common."""

    tokens: int
    length: int


class _Parts(IterableDataset[Batch]):
    """Every part from `first` on, shared out among the processes in turns."""

    def __init__(self, data: TrainingData, kind: _Kind, first: int) -> None:
        self._data, self._kind, self._first = data, kind, first

    def __iter__(self) -> Iterator[Batch]:
        """This process's parts, without an end."""
        worker = get_worker_info()
        assert worker is not None, "made in a process of its own"
        part = self._first + worker.id
        while True:
            yield self._data.batch(part, *self._kind)
            part += worker.num_workers


class MadeAhead:
    """Parts of a run in their order, made by `loaders` processes, at most one a core; 0: when asked
    for."""

    def __init__(self, data: TrainingData, loaders: int) -> None:
        self.tokenizer = data.tokenizer
        self._data, self._loaders = data, min(loaders, os.cpu_count() or 1)
        self._next: tuple[_Kind, int] | None = None
        self._made: Iterator[Batch] = iter(())

    def batch(self, index: int, tokens: int, length: int) -> Batch:
        """Part `index`: rows of `length` tokens, `tokens` in all."""
        if self._loaders == 0:
            return self._data.batch(index, tokens, length)
        kind = _Kind(tokens, length)
        if self._next != (kind, index):
            self._made = self._begin(kind, index)
        self._next = kind, index + 1
        return next(self._made)

    def _begin(self, kind: _Kind, first: int) -> Iterator[Batch]:
        parts = _Parts(self._data, kind, first)
        return iter(
            DataLoader(
                parts,
                batch_size=None,
                num_workers=self._loaders,
                prefetch_factor=MADE_AHEAD,
                multiprocessing_context="fork",  # the text is not copied
            )
        )
