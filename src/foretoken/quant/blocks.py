"""Matrices in the blocks of GGUF files, left as they lie there until they are packed.

Layouts are ggml's. A block of 32 or 256 inputs has integer values, scales of groups of 32 or 16 of
them, and for some types minima: a weight is value * scale - minimum.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.block_types import BlockRows, count_strange
from foretoken.kernels.library import Library
from foretoken.quant.weights import IntWeights
from foretoken.shape.block_kinds import BLOCK_KINDS, STEP

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of FP4, E2M1."""
_FLOATS = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2),
    "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
"""Where a block has 16-bit floats, if not at its start alone."""
_FOUR_BITS = ("Q4_1", "Q4_K")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """A matrix [N, K] in blocks of one type; rows and columns may be in another order."""

    kind: str
    """ggml's name of the type, one of `BLOCK_KINDS`."""
    stored: tuple[Tensor, ...]
    """uint8 [rows, bytes] each, over each other."""
    order_N: Tensor
    """int64: which of the stored rows comes where. On the device that the matrix is for; the bytes
    stay where they were read."""
    columns: Tensor | None = None
    """int32 [K / width]: which `width` of the stored inputs come where; None: all as stored."""
    width: int = 0

    @classmethod
    def as_stored(cls, kind: str, rows_NB: Tensor) -> "BlockWeights":
        return cls(kind=kind, stored=(rows_NB,), order_N=torch.arange(rows_NB.shape[0]))

    @property
    def shape(self) -> torch.Size:
        """[N, K]."""
        block = BLOCK_KINDS[self.kind]
        inputs = self.stored[0].shape[1] // block.num_bytes * block.inputs
        return torch.Size((self.order_N.numel(), inputs))

    def changed_rows(self, change: Callable[[Tensor], Tensor]) -> "BlockWeights":
        """Apply what picks or reorders along the first dimension."""
        return replace(self, order_N=change(self.order_N[:, None])[:, 0].contiguous())

    def changed_columns(
        self, change: Callable[[Tensor], Tensor], width: int
    ) -> "BlockWeights | None":
        """Apply what reorders blocks of `width` inputs along the first dimension of [K, N].

        Returns:
            None, if that would cut a group.
        """
        if width % STEP or self.columns is not None:
            return None
        order_K = change(torch.arange(self.shape[1])[:, None])[:, 0]
        return replace(self, columns=(order_K[::width] // width).int(), width=width)

    def joined(self, below: "BlockWeights") -> "BlockWeights | None":
        """This over another one; None: they are of different kinds."""
        if self.kind != below.kind or self.columns is not None or below.columns is not None:
            return None
        rows = sum(part.shape[0] for part in self.stored)
        order_N = torch.cat([self.order_N, below.order_N + rows])
        return replace(self, stored=self.stored + below.stored, order_N=order_N)

    def strange_numbers(self, library: Library | None = None) -> int:
        """How many of the floats in its blocks are NaN or infinite; counted by the kernels where
        they are given."""
        if library is not None:
            return count_strange(library, self.rows())
        count, size = 0, BLOCK_KINDS[self.kind].num_bytes
        for part in self.stored:
            if self.kind == "MXFP4":
                count += int((part[:, ::size] == 255).sum())
                continue
            for at in _FLOATS.get(self.kind, (0,)):
                floats = part.view(torch.int16)[:, at // 2 :: size // 2]
                count += int(((floats & 0x7C00) == 0x7C00).sum())
        return count

    def rows(self) -> BlockRows:
        """Where the rows are, for the kernels."""
        # NumPy's: PyTorch shares such an index among threads, which wait in a loop for a busy core.
        parts = [
            part.data_ptr() + np.arange(part.shape[0], dtype=np.int64) * part.stride(0)
            for part in self.stored
        ]
        addresses_N = torch.from_numpy(np.concatenate(parts)[self.order_N.numpy()])
        return BlockRows(
            kind=self.kind,
            addresses_N=addresses_N,
            kept=self.stored,
            inputs=self.shape[1],
            columns=self.columns,
            width=self.width,
        )

    def _arranged(self, numbers: Tensor, width: int) -> Tensor:
        """[N, ...] of the stored inputs in the order of ours; `width` numbers are of what is
        reordered together."""
        if self.columns is None:
            return numbers
        parts: Tensor = numbers.unflatten(1, (-1, width))[:, self.columns.long()]
        return parts.flatten(1)

    def _numbers(self, start: int, stop: int | None) -> "_Numbers":
        """Blocks of rows [start, stop) as numbers, on the CPU."""
        order_N = self.order_N[start:stop].cpu()
        stored = torch.empty(order_N.numel(), self.stored[0].shape[1], dtype=torch.uint8)
        first = 0
        for part in self.stored:
            mine = (order_N >= first) & (order_N < first + part.shape[0])
            stored[mine] = part[order_N[mine] - first]
            first += part.shape[0]
        return _READERS[self.kind](stored.unflatten(1, (-1, BLOCK_KINDS[self.kind].num_bytes)))

    def floats(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) multiplied out, float32, on the CPU."""
        return self._arranged(self._numbers(start, stop).floats(), self.width)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The matrix, in pieces so that no float32 copy of all is ever there, on its device."""
        rows, inputs = self.shape
        found = torch.empty(rows, inputs, dtype=dtype, device=self.order_N.device)
        piece = max(1, (1 << 20) // inputs)
        for at in range(0, rows, piece):
            found[at : at + piece] = self.floats(at, at + piece)
        return found

    def integers(self) -> IntWeights:
        """The matrix as whole numbers in groups, for kernels that know nothing of blocks: of 4 bits
        where the type has no more, else of 8. More bytes than as stored, fewer than floats. Zero
        points are no whole numbers, and always there of 4 bits."""
        rows, inputs = self.shape
        piece = max(1, (1 << 20) // inputs)
        pieces = [self._integers(at, at + piece) for at in range(0, rows, piece)]
        zeros = [zero for _, _, zero in pieces if zero is not None]
        device = self.order_N.device
        return IntWeights(
            bits=4 if self.kind in _FOUR_BITS else 8,
            values_NK=torch.cat([values for values, _, _ in pieces]).to(device),
            scale_NG=torch.cat([scale for _, scale, _ in pieces]).to(device),
            zero_NG=torch.cat(zeros).to(device) if zeros else None,
        )

    def _integers(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor | None]:
        found = self._numbers(start, stop)
        kind = torch.uint8 if self.kind in _FOUR_BITS else torch.int8
        groups = self.width // found.values.shape[-1]
        values_NK, scale_NG = found.values.flatten(1).to(kind), found.scale.flatten(1)
        zero_NG = None
        if found.minimum is not None:
            minimum_NG = found.minimum.flatten(1)
            # A group of one number alone: a scale so small that its values change nothing.
            scale_NG = torch.where(scale_NG == 0, minimum_NG * 2.0**-24, scale_NG)
            zero_NG = torch.where(scale_NG == 0, 0.0, minimum_NG / scale_NG)
            zero_NG = self._arranged(zero_NG, groups)
        return self._arranged(values_NK, self.width), self._arranged(scale_NG, groups), zero_NG


class _Numbers(NamedTuple):
    """Blocks [N, blocks] as numbers: groups of inputs with a scale, and perhaps a minimum."""

    values: Tensor
    """[N, blocks, groups, inputs of a group]."""
    scale: Tensor
    """[N, blocks, groups]."""
    minimum: Tensor | None = None

    def floats(self) -> Tensor:
        """Multiplied out, float32 [N, K]."""
        weights = self.values.float() * self.scale[..., None]
        if self.minimum is not None:
            weights -= self.minimum[..., None]
        return weights.flatten(1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The 16-bit float at a place of each block, float32 [N, blocks, 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves, then high ones, of the last dimension, int32."""
    return torch.cat([packed & 15, packed >> 4], -1).int()


def _bits(packed: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Fields of the bytes in the last dimension: [..., shifts, bytes]."""
    shift = torch.tensor(shifts, dtype=torch.int32)[:, None]
    return packed.int()[..., None, :] >> shift & mask


def _fifth(packed: Tensor) -> Tensor:
    """Bit i of four bytes for input i, as what it adds: [..., 32]."""
    return (_bits(packed, range(8), 1).transpose(-1, -2).flatten(-2) << 4).int()


def _q4_1(blocks: Tensor) -> _Numbers:
    return _Numbers(_nibbles(blocks[..., 4:])[..., None, :], _half(blocks, 0), -_half(blocks, 2))


def _q5_0(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[..., 6:]) + _fifth(blocks[..., 2:6]) - 16
    return _Numbers(values[..., None, :], _half(blocks, 0))


def _q5_1(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[..., 8:]) + _fifth(blocks[..., 4:8])
    return _Numbers(values[..., None, :], _half(blocks, 0), -_half(blocks, 2))


def _iq4_nl(blocks: Tensor) -> _Numbers:
    values = torch.tensor(_IQ4)[_nibbles(blocks[..., 2:])]
    return _Numbers(values[..., None, :], _half(blocks, 0))


def _mxfp4(blocks: Tensor) -> _Numbers:
    values = torch.tensor(_FP4)[_nibbles(blocks[..., 1:])]
    scale = torch.exp2(blocks[..., :1].double() - 128).float()
    return _Numbers(values[..., None, :], scale)


def _sixes(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and minima of Q4_K and Q5_K, 6 bits each, times the block's floats: [..., 8]."""
    small = blocks[..., 4:16]
    first, second, third = small[..., :4], small[..., 4:8], small[..., 8:]
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)
    return _half(blocks, 0) * scales, _half(blocks, 2) * minima


def _q4_k(blocks: Tensor) -> _Numbers:
    values = _nibbles(blocks[..., 16:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    return _Numbers(values.flatten(-3, -2), *_sixes(blocks))


def _q5_k(blocks: Tensor) -> _Numbers:
    low = _nibbles(blocks[..., 48:].unflatten(-1, (4, 32))).unflatten(-1, (2, 32))
    high = _bits(blocks[..., 16:48], range(8), 1) << 4
    return _Numbers(low.flatten(-3, -2) + high, *_sixes(blocks))


def _q6_k(blocks: Tensor) -> _Numbers:
    low = blocks[..., :128].unflatten(-1, (2, 64))
    low = torch.cat([low & 15, low >> 4], -1).int()
    high = _bits(blocks[..., 128:192].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3).flatten(-2)
    values = (low + (high << 4) - 32).flatten(-2).unflatten(-1, (16, 16))
    scales = blocks[..., 192:208].contiguous().view(torch.int8)
    return _Numbers(values, _half(blocks, 208) * scales)


def _q2_k(blocks: Tensor) -> _Numbers:
    values = _bits(blocks[..., 16:80].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3)
    small = blocks[..., :16]
    scale, minimum = _half(blocks, 80) * (small & 15), _half(blocks, 82) * (small >> 4)
    return _Numbers(values.flatten(-3).unflatten(-1, (16, 16)), scale, minimum)


def _q3_k(blocks: Tensor) -> _Numbers:
    low = _bits(blocks[..., 32:96].unflatten(-1, (2, 32)), (0, 2, 4, 6), 3).flatten(-3)
    high = _bits(blocks[..., :32], range(8), 1).flatten(-2) << 2
    small = blocks[..., 96:108]
    four = torch.cat([small[..., :8] & 15, small[..., :8] >> 4], -1).int()
    two = _bits(small[..., 8:], (0, 2, 4, 6), 3).flatten(-2)
    scale = _half(blocks, 108) * ((four | two << 4) - 32)
    return _Numbers((low + high - 4).unflatten(-1, (16, 16)), scale)


def _iq4_xs(blocks: Tensor) -> _Numbers:
    values = torch.tensor(_IQ4)[_nibbles(blocks[..., 8:].unflatten(-1, (8, 16)))]
    low = torch.stack([blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4], -1).flatten(-2).int()
    high = _bits(blocks[..., 2:4], (0, 2, 4, 6), 3).transpose(-1, -2).flatten(-2)
    return _Numbers(values, _half(blocks, 0) * ((low | high << 4) - 32))


_READERS: dict[str, Callable[[Tensor], _Numbers]] = {
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}
