"""Token sequences laid end to end and cut into rows of one length.

Owns the cuts and the order in which rows are seen. It knows neither where tokens come from nor
what is read of them. Invariants: a row's tokens depend on its number and length alone, so what was
computed for a row stays true; an epoch has every row once, in an order of its own.
"""

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def count_rows(tokens: int, length: int) -> int:
    """How many rows of `length` cover `tokens` tokens; one at least."""
    return max(1, -(-tokens // length))


class PackedRows:
    """Rows of some tokens; the last one ends with the last token."""

    def __init__(self, tokens: NDArray[Any], seed: int) -> None:
        """Cut `tokens`, integers of any type, of which there must be at least one."""
        assert len(tokens), "nothing to cut"
        self._tokens = tokens
        self._seed = seed
        self._epoch: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], seed: int) -> Self:
        """Rows of `sequences` laid end to end."""
        return cls(np.concatenate([np.asarray(ids, dtype=np.int64) for ids in sequences]), seed)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self._tokens)

    def rows(self, numbers: Sequence[int], length: int) -> Tensor:
        """The rows of these numbers, int64 [B, length]; data shorter than a row repeats."""
        last = max(0, len(self._tokens) - length)
        starts = [min(number * length, last) for number in numbers]
        cut = [np.resize(self._tokens[start : start + length], length) for start in starts]
        return torch.from_numpy(np.stack(cut).astype(np.int64))

    def order(self, index: int, count: int, length: int) -> list[int]:
        """The numbers of the `count` rows of part `index`, the same for the same part."""
        per_epoch = count_rows(len(self._tokens), length)
        found = []
        for place in range(index * count, (index + 1) * count):
            epoch, within = divmod(place, per_epoch)
            found.append(int(self._order(epoch, length, per_epoch)[within]))
        return found

    def _order(self, epoch: int, length: int, per_epoch: int) -> NDArray[np.int64]:
        if self._epoch is None or self._epoch[0] != (epoch, length):
            dice = np.random.default_rng((self._seed, epoch, length))
            self._epoch = (epoch, length), dice.permutation(per_epoch)
        return self._epoch[1]

    def frequent_ids(self, vocab_size: int) -> Tensor:
        """All token ids, those that occur most often first, int64 [V]."""
        counts = np.bincount(self._tokens, minlength=vocab_size)
        return torch.from_numpy(np.argsort(-counts, kind="stable"))
