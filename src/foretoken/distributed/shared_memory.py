"""A group on one host, over memory that its processes share (native/group.h).

Each rank has a segment: its counters of turns and of heartbeats, a note for the others if it gives
up, and two buffers that take turns. The segments have no names, so nothing can be left behind: the
system frees them with the last process. Knows nothing of how processes are started.
"""

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from typing import Final, final

import torch
from torch import Tensor

from foretoken.distributed.group import LABEL_BYTES, Group, Label, Rendezvous, bytes_of
from foretoken.distributed.heart import SILENT_S, Heart
from foretoken.errors import RankLostError
from foretoken.hardware import usable_cores
from foretoken.kernels.library import Library, find_library
from foretoken.kernels.structures import MOST_RANKS, FtGroup, FtSeat

_PTR, _I32, _I64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64

BUFFER_BYTES: Final = 16 << 20
"""A tensor beyond it goes in several turns. Memory is taken as it is written."""
_HEAD_BYTES: Final = 4096
_NOTE_AT, _NOTE_BYTES = 1024, 2048
_SPIN_NS: Final = 20_000
_LEFT, _DIED, _LATE, _STILL = 1, 2, 3, 4
_JOIN_S: Final = 120.0
"""Importing PyTorch takes seconds, and many on a busy machine."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemoryRendezvous(Rendezvous):
    """Segments that processes on this host are given."""

    segments: tuple[int, ...]
    """Their descriptors."""
    wait_s: float
    segment_bytes: int

    @classmethod
    def make(
        cls, size: int, wait_s: float, buffer_bytes: int = BUFFER_BYTES
    ) -> "SharedMemoryRendezvous":
        """Make the segments of `size` ranks, with two buffers each; `join` uses them up."""
        assert 1 <= size <= MOST_RANKS, (size, MOST_RANKS)
        assert buffer_bytes % 64 == 0, buffer_bytes
        num_bytes = _HEAD_BYTES + 2 * buffer_bytes
        made = tuple(os.memfd_create(f"foretoken rank {rank}") for rank in range(size))
        for segment in made:
            os.ftruncate(segment, num_bytes)
        return cls(segments=made, wait_s=wait_s, segment_bytes=num_bytes)

    @property
    def size(self) -> int:
        return len(self.segments)

    @property
    def descriptors(self) -> tuple[int, ...]:
        return self.segments

    def with_descriptors(self, received: tuple[int, ...]) -> "SharedMemoryRendezvous":
        assert len(received) == self.size, (len(received), self.size)
        return replace(self, segments=received)

    def join(self, rank: int, lines: Mapping[int, int]) -> "SharedMemoryGroup":
        """Map all segments and wait for the others."""
        library = find_library()
        assert library is not None, "whoever makes it has the kernels"
        mapped = [mmap(segment, self.segment_bytes) for segment in self.segments]
        for segment in self.segments:
            os.close(segment)
        group = SharedMemoryGroup(library, mapped, rank, lines, self.wait_s)
        try:
            group.swap(torch.empty(0), _JOIN_S)
        except BaseException:
            group.close()
            raise
        return group


@final
class SharedMemoryGroup(Group):
    """Copies in, counts a turn, waits for the others' counters, and reads their buffers."""

    def __init__(
        self,
        library: Library,
        segments: Sequence[mmap],
        rank: int,
        lines: Mapping[int, int],
        wait_s: float,
    ) -> None:
        self.rank, self.size, self.wait_s = rank, len(segments), wait_s
        self._views = [memoryview(segment) for segment in segments]
        self._bytes = [torch.frombuffer(segment, dtype=torch.uint8) for segment in segments]
        self._buffer_bytes = (len(segments[0]) - _HEAD_BYTES) // 2
        self._room = self._buffer_bytes - LABEL_BYTES
        self._turns = 0
        self._ended = False
        self._call = FtGroup(
            rank=rank,
            size=self.size,
            # Whoever looks where another could run only keeps it waiting.
            spin_ns=_SPIN_NS if self.size <= usable_cores() else 0,
        )
        self._call.seats[: self.size] = [x.data_ptr() for x in self._bytes]
        self._call.lines[: self.size] = [lines.get(other, -1) for other in range(self.size)]
        self._arrive = library.function("ft_group_arrive", (_PTR,))
        self._wait = library.function("ft_group_wait", (_PTR, _PTR), _I64)
        self._end = library.function("ft_group_end", (_PTR, _I32, _I32), _I64)
        self._seats = [FtSeat.from_buffer(segment) for segment in segments]
        address = ctypes.addressof(self._call)
        died, still = partial(self._end, address, _DIED), partial(self._end, address, _STILL)
        self._heart = Heart(self._seats, rank, lines, died=died, still=still, ended=self._tell)

    def swap(self, x: Tensor, wait_s: float | None) -> list[Tensor]:
        """The other ranks' are views of their buffers where they fit in."""
        x = x.contiguous()
        flat = bytes_of(x)
        at = self._begin()
        Label.of(x).put(self._views[self.rank], at)
        self._write(flat[: self._room], at)
        self._take_turn(wait_s)
        labels = [Label.read(view, at) for view in self._views]
        most = max(label.payload for label in labels)
        if most <= self._room:
            return [
                one.narrow(0, at + LABEL_BYTES, label.payload).view(label.dtype).view(label.shape)
                for one, label in zip(self._bytes, labels, strict=True)
            ]
        whole = [torch.empty(label.shape, dtype=label.dtype) for label in labels]
        pieces = [bytes_of(one) for one in whole]
        self._read(pieces, 0, at)
        for done in range(self._room, most, self._room):
            at = self._begin()
            self._write(flat[done : done + self._room], at)
            self._take_turn(self.wait_s)
            self._read(pieces, done, at)
        return whole

    def check(self) -> None:
        """Look at the word that ends it."""
        word = self._seats[0].ended[0] if self._seats else _LEFT << 8 | self.rank
        if word:
            raise RankLostError(self._describe(word, None))

    def abort(self, why: str) -> None:
        """Leave a note, then end the group."""
        if self._ended:
            return
        self._ended = True
        note = why.encode()[: _NOTE_BYTES - 1] + b"\0"
        self._views[self.rank][_NOTE_AT : _NOTE_AT + len(note)] = note
        self._end(ctypes.addressof(self._call), _LEFT, self.rank)

    def close(self) -> None:
        """End the group; the memory goes with the last process's last look at it."""
        self.abort("it was closed")
        self._heart.stop()
        self._views, self._bytes, self._seats = [], [], []

    def _tell(self) -> None:
        if self.at_end is not None:
            self.at_end()

    def _begin(self) -> int:
        """Where the buffer of the next turn is, in every segment."""
        if not self._views:
            raise RankLostError("the group of this process has been closed")
        return _HEAD_BYTES + self._turns % 2 * self._buffer_bytes

    def _write(self, piece: Tensor, at: int) -> None:
        self._bytes[self.rank].narrow(0, at + LABEL_BYTES, piece.shape[0]).copy_(piece)

    def _read(self, pieces: Sequence[Tensor], done: int, at: int) -> None:
        """Copy what follows the first `done` bytes of every rank's tensor."""
        for one, piece in zip(self._bytes, pieces, strict=True):
            part = piece[done : done + self._room]
            part.copy_(one.narrow(0, at + LABEL_BYTES, part.shape[0]))

    def _take_turn(self, wait_s: float | None) -> None:
        address = ctypes.addressof(self._call)
        left = _I64(-1 if wait_s is None else round(wait_s * 1e9))
        self._turns += 1
        self._arrive(address)
        word = -1
        while word < 0:  # After a signal, whose handler Python runs between two calls.
            word = self._wait(address, ctypes.addressof(left))
        if word:
            raise RankLostError(self._describe(word, wait_s))

    def _describe(self, word: int, wait_s: float | None) -> str:
        reason, rank = word >> 8, word & 0xFF
        if reason == _DIED:
            return f"the process of rank {rank} has died"
        if reason == _STILL:
            return f"the process of rank {rank} has given no sign of life for {SILENT_S:g} s"
        if reason == _LATE:
            waited = "in time" if wait_s is None else f"within {wait_s:g} s"
            return f"the process of rank {rank} did not answer {waited}"
        assert reason == _LEFT, (reason, rank)
        if not self._views:
            return "the group of this process has been closed"
        note = bytes(self._views[rank][_NOTE_AT : _NOTE_AT + _NOTE_BYTES]).partition(b"\0")[0]
        return f"the process of rank {rank} has left: {note.decode(errors='replace')}"
