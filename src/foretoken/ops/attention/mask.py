"""Causal masks as views of one table: nothing is computed for a decode or verification step.

Row (t, g) of the table is 0 up to column `reach + t` and -inf after it, for any g. The mask of a
tile whose first token is at position s, over keys 0..L-1, is columns [reach - s, reach - s + L).
"""

import torch
from torch import Tensor

_FIRST_REACH = 1024


class MaskTable:
    """Additive masks for tiles of `rows` consecutive positions, each row repeated `group` times."""

    def __init__(self, rows: int, group: int, *, dtype: torch.dtype, device: torch.device) -> None:
        """Start small; grows with the longest context seen."""
        self.rows = rows
        self._group = group
        self._dtype = dtype
        self._device = device
        self._grow(_FIRST_REACH)

    def tile(self, start: int, length: int, rows: int) -> Tensor:
        """[rows * group, length] for positions start, start + 1, ...; a view."""
        assert rows <= self.rows, (rows, self.rows)
        if max(start, length) > self._reach:
            self._grow(max(start, length))
        first = self._reach - start
        return self._table[: rows * self._group, first : first + length]

    def tiles(self, start: int, length: int, count: int) -> Tensor:
        """[count, 1, self.rows * group, length]: tiles one after the other."""
        starts = range(start, start + count * self.rows, self.rows)
        if count == 1:
            return self.tile(start, length, self.rows)[None, None]
        return torch.stack([self.tile(at, length, self.rows) for at in starts])[:, None]

    def _grow(self, least: int) -> None:
        self._reach = max(_FIRST_REACH, 1 << (least - 1).bit_length())
        columns = torch.arange(2 * self._reach, device=self._device)
        last = self._reach + torch.arange(self.rows, device=self._device)
        table = torch.zeros(self.rows, columns.shape[0], dtype=self._dtype, device=self._device)
        table.masked_fill_(columns > last[:, None], float("-inf"))
        self._table = table.repeat_interleave(self._group, 0)
