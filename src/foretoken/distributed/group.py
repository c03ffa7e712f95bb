"""A group of processes, its ranks, and the one thing that they do together: swap tensors.

Knows no models. Nothing here adds numbers, so nothing depends on an order: what comes out is made
of bits that went in. Invariants: every rank calls the same operations in the same order; a wait
ends, with the others' tensors or with `RankLostError` on every rank that still runs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from foretoken.shape.memory_formula import copies_of

IDLE: Final = None
"""Time to wait where there may be nothing to do for hours."""


class Group(ABC):
    """One rank's view of its group. Not thread-safe."""

    rank: int
    size: int
    wait_s: float
    """Seconds that a rank waits for another before it gives the group up; may be changed by all
    ranks between the same two operations."""
    at_end: Callable[[], None] | None = None
    """Is called in another thread once it is known there that the group has ended, for whoever is
    held up by what never comes. Groups that have no such thread do not call it."""

    @abstractmethod
    def swap(self, x: Tensor, wait_s: float | None) -> list[Tensor]:
        """Every rank's tensor, in the order of ranks, valid until the next call.

        Args:
            x: on the CPU, of any shape and type; ranks may give different ones.
            wait_s: seconds to wait for the others; `IDLE`: until they come or the group ends.

        Raises:
            RankLostError: a rank left, died or was late.
        """

    @abstractmethod
    def check(self) -> None:
        """Raise if it is known here that the group has ended; waits for nobody.

        Raises:
            RankLostError: a rank left, died or was late.
        """

    @abstractmethod
    def abort(self, why: str) -> None:
        """End the group for all ranks, who are told `why`; an end that was before stands."""

    @abstractmethod
    def close(self) -> None:
        """Leave, which ends the group for those who still wait. Closing twice is fine."""

    def parts(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor, as `swap`, of what layers compute, where they compute it.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        return self.swap(x, self.wait_s)

    def gather_into(self, x: Tensor, found_RX: Tensor) -> None:
        """The same of tensors of one shape and type, into memory that is given.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        torch.stack(self.parts(x), out=found_RX)

    def exchange_into(self, x_RX: Tensor, found_RX: Tensor) -> None:
        """Each rank's row for this one, of tensors of one shape and type with a row for each rank.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        torch.stack([part[self.rank] for part in self.parts(x_RX)], out=found_RX)

    def finish(self) -> None:
        """Wait until this rank's device has computed what was asked of it.

        Raises:
            RankLostError: a rank left, died or was late, so that this never comes.
        """
        self.check()

    @final
    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """What `torch.cat` makes of all ranks' tensors along `dim`, on every rank.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        return _joined(self.parts(x), dim)

    @final
    def gather(self, x: Tensor, dim: int) -> Tensor | None:
        """The same on rank 0; None on the others.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        parts = self.swap(x, self.wait_s)
        return None if self.rank else _joined(parts, dim)

    @final
    def broadcast(self, message: bytes | None, *, idle: bool = False) -> bytes:
        """What rank 0 says.

        Args:
            message: on rank 0; None on the others.
            idle: whether others wait for it as long as it takes; rank 0 never waits so long.

        Raises:
            RankLostError: a rank left, died or was late.
        """
        assert (message is None) == (self.rank > 0), (self.rank, message is None)
        said = torch.empty(0, dtype=torch.uint8)
        if message:
            said = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        parts = self.swap(said, IDLE if idle and self.rank else self.wait_s)
        return parts[0].numpy().tobytes()


class Rendezvous(ABC):
    """How the processes of a group find each other. Rank 0 makes it; it travels as a pickle."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors that a process must have before it joins."""
        return ()

    def with_descriptors(self, received: tuple[int, ...]) -> "Rendezvous":
        """The same for a process that has them under these numbers."""
        assert not received, received
        return self

    @abstractmethod
    def join(self, rank: int, lines: Mapping[int, int]) -> Group:
        """Wait for the others.

        Args:
            rank: of this process.
            lines: rank -> a descriptor that can be read, or hangs up, when that one has died.
                Rank 0 has those of all others, they have rank 0's.

        Raises:
            RankLostError: a rank died or did not come.
        """


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    types = {part.dtype for part in parts}
    assert len(types) == 1, f"one type for all ranks: {types}"
    return torch.cat(parts, dim)


_TYPES: Final = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
)  # fmt: skip
_LABEL: Final = Struct("=16q")
_MOST_DIMS: Final = 13
LABEL_BYTES: Final = _LABEL.size


class Label(NamedTuple):
    """What goes before a tensor's bytes: how many they are, and of what."""

    payload: int
    """Bytes."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Label":
        return cls(x.numel() * x.element_size(), x.dtype, tuple(x.shape))

    def numbers(self) -> list[int]:
        """Sixteen numbers that say it."""
        dims = len(self.shape)
        assert dims <= _MOST_DIMS, (dims, _MOST_DIMS)
        rest = [0] * (_MOST_DIMS - dims)
        return [self.payload, _TYPES.index(self.dtype), dims, *self.shape, *rest]

    def put(self, buffer: memoryview, at: int) -> None:
        _LABEL.pack_into(buffer, at, *self.numbers())

    @classmethod
    def read(cls, buffer: memoryview, at: int) -> "Label":
        return cls.from_numbers(_LABEL.unpack_from(buffer, at))

    @classmethod
    def from_numbers(cls, numbers: tuple[int, ...]) -> "Label":
        payload, kind, dims, *shape = numbers
        return cls(payload, _TYPES[kind], tuple(shape[:dims]))


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, uint8 [bytes], without a copy."""
    assert x.is_contiguous(), x.stride()
    return x.reshape(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a number of equal things is that of a rank among `size`: heads, outputs of a
    matrix, ids, layers. Parts are neighbours in the order of ranks, so that gathered parts stand
    where they belong; alone it has everything."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> range:
        """This rank's part of `range(total)`: as large as the others' or one larger or smaller.

        `total` is at least the number of ranks, so that nobody is left without.
        """
        assert total >= self.size, (total, self.size)
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)

    def key_heads(self, total: int) -> range:
        """This rank's part of so many key heads; neighbours have the same one where there are
        fewer than ranks."""
        copies = copies_of(total, self.size)
        return Share(self.rank // copies, self.size // copies).of(total)

    def queries(self, key_heads: int, queries: int) -> range:
        """Which of the `queries` query heads of each of its key heads are this rank's; those who
        have the same key head share them out."""
        copies = copies_of(key_heads, self.size)
        return Share(self.rank % copies, copies).of(queries)
