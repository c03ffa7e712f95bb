"""The embedding: rows of a table by token.

The table is floats, or a layer packed for the kernels whose outputs are the tokens: then rows are
multiplied out as they are asked for (`kernels/native/embedding.h`), with the bits that the table
would have as floats. Where embeddings are tied, that layer is the output head itself. Owns no
weights; a family's scale is the caller's affair.
"""

import ctypes
from functools import cached_property
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import FtEmbedding
from foretoken.ops.linear import KernelLinear

_PIECE: Final = 1 << 22
"""Numbers of a packed table that are there as floats at once, where all of it is compared."""


@final
class Embedding:
    """A table [V, D] that is asked for rows."""

    def __init__(self, table: Tensor | KernelLinear) -> None:
        """Read from floats, which may be trained, or from a layer, which must stay as it is."""
        self._table = table
        if isinstance(table, Tensor):
            self.shape, self.dtype, self.device = table.shape, table.dtype, table.device
        else:
            assert not table.packed.gated and len(table.parts) == 1, "a row for each token"
            self.shape = torch.Size((table.packed.outputs, table.packed.inputs))
            self.dtype, self.device = table.dtype, torch.device("cpu")

    def __call__(self, tokens: Tensor) -> Tensor:
        """The rows of these tokens, int64 [...]: [..., D], memory of their own."""
        table = self._table
        if isinstance(table, Tensor):
            return F.embedding(tokens, table)
        assert tokens.dtype == torch.int64, tokens.dtype
        tokens = tokens.contiguous()
        rows = torch.empty(*tokens.shape, self.shape[1], dtype=self.dtype)
        known = self._embed(self.address, tokens.data_ptr(), tokens.numel(), rows.data_ptr())
        assert known, (int(tokens.min()), int(tokens.max()), self.shape)
        return rows

    @property
    def is_packed(self) -> bool:
        """Whether rows are multiplied out."""
        return not isinstance(self._table, Tensor)

    @property
    def num_bytes(self) -> int:
        """Of the table as it is kept, whether or not it is the head's too."""
        table = self._table
        return table.nbytes if isinstance(table, Tensor) else table.packed.num_bytes

    def floats(self) -> Tensor:
        """The whole table, [V, D]: itself, or multiplied out for this call."""
        table = self._table
        return table if isinstance(table, Tensor) else self(torch.arange(self.shape[0]))

    def equals(self, other_VD: Tensor) -> bool:
        """Whether these floats are the table's, in its type."""
        if isinstance(self._table, Tensor):
            return torch.equal(self._table, other_VD)
        if other_VD.shape != self.shape or other_VD.dtype != self.dtype:
            return False
        pieces = torch.arange(self.shape[0]).split(max(1, _PIECE // self.shape[1]))
        return all(torch.equal(self(piece), other_VD[piece]) for piece in pieces)

    @property
    def has_address(self) -> bool:
        """Whether kernels can read it."""
        table = self._table
        if not isinstance(table, Tensor):
            return True
        return backend_for(table.device).rows(table) is not None and table.is_contiguous()

    @property
    def address(self) -> int:
        """Address of its ft_embedding, for kernels. Valid while this object lives."""
        return ctypes.addressof(self._struct)

    @cached_property
    def _embed(self) -> Any:
        """ft_embed(table, tokens, rows, to)."""
        assert not isinstance(self._table, Tensor), "floats need no kernel"
        arguments = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)
        return self._table.library.function("ft_embed", arguments, ctypes.c_int)

    @cached_property
    def _struct(self) -> FtEmbedding:
        assert self.has_address, (self.dtype, self.device)
        table, kind = self._table, TYPES[self.dtype]
        found = FtEmbedding(tokens=self.shape[0], width=self.shape[1], type=kind)
        if isinstance(table, Tensor):
            found.floats = table.data_ptr()
        else:
            found.packed = table.address
        return found
