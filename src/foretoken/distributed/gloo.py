"""A group over torch.distributed's gloo: sockets, so it needs no kernels of ours.

Owns a process group of its own, which is not PyTorch's default one. Gloo gathers tensors of one
size only: labels go first, then bytes as many as the largest tensor has. Not every PyTorch has what
is imported here: import this where a group is made.
"""

import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Final, final

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, ProcessGroupGloo, TCPStore

from foretoken.distributed.group import Group, Label, Rendezvous, bytes_of
from foretoken.errors import RankLostError

_LONGEST: Final = timedelta(days=7)
"""Gloo has no wait without end."""
_HOST: Final = "127.0.0.1"
_JOIN: Final = timedelta(seconds=120)
"""Time for all ranks to come."""


def open_store(size: int) -> TCPStore:
    """Rank 0's, where the ranks find each other, on a free port; waits for nobody."""
    return TCPStore(_HOST, 0, size, True, _JOIN, wait_for_workers=False)


def reach_store(port: int, size: int) -> TCPStore:
    """Another rank's."""
    return TCPStore(_HOST, port, size, False, _JOIN)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GlooRendezvous(Rendezvous):
    """A store of rank 0 on a free port of this host."""

    size: int
    port: int
    wait_s: float
    made: list[TCPStore] = field(default_factory=list)
    """Rank 0's, which stays there."""

    @classmethod
    def make(cls, size: int, wait_s: float) -> "GlooRendezvous":
        """Open the store; it ends with the group of rank 0."""
        store = open_store(size)
        return cls(size=size, port=store.port, wait_s=wait_s, made=[store])

    def join(self, rank: int, lines: Mapping[int, int]) -> "GlooGroup":
        try:
            store = self.made.pop() if self.made else reach_store(self.port, self.size)
            found = ProcessGroupGloo(store, rank, self.size, _JOIN)
        except RuntimeError as error:
            raise RankLostError(f"not all processes came: {_first_line(error)}") from error
        return GlooGroup(found, rank, self.size, self.wait_s, lines)

    def __reduce__(self) -> tuple[Callable[..., Rendezvous], tuple[()]]:
        """A pickle without the store."""
        return partial(GlooRendezvous, size=self.size, port=self.port, wait_s=self.wait_s), ()


@final
class GlooGroup(Group):
    """Two gathers for each swap. Whoever leaves closes its connections, which the others notice."""

    def __init__(
        self,
        found: ProcessGroupGloo,
        rank: int,
        size: int,
        wait_s: float,
        lines: Mapping[int, int],
    ) -> None:
        """Take over a process group that is connected; `lines` as for `Rendezvous.join`."""
        self.rank, self.size, self.wait_s = rank, size, wait_s
        self._group: Any = found  # whose operations have no types
        self._ranks = {line: other for other, line in lines.items()}
        self._hung_up = select.poll()
        for line in self._ranks:
            self._hung_up.register(line, select.POLLIN)

    def swap(self, x: Tensor, wait_s: float | None) -> list[Tensor]:
        """Labels, then bytes."""
        flat = bytes_of(x.contiguous())
        numbers = self._gather(torch.tensor(Label.of(x).numbers()), wait_s)
        labels = [Label.from_numbers(tuple(one.tolist())) for one in numbers]
        most = max(label.payload for label in labels)
        if not most:
            return [torch.empty(label.shape, dtype=label.dtype) for label in labels]
        padded = torch.empty(most, dtype=torch.uint8)
        padded[: flat.shape[0]] = flat
        return [
            one[: label.payload].view(label.dtype).view(label.shape)
            for one, label in zip(self._gather(padded, self.wait_s), labels, strict=True)
        ]

    def check(self) -> None:
        """Gloo tells only those who gather; lines tell who died."""
        if self._group is None:
            raise RankLostError("the group of this process has been closed")
        self._look_for_dead()

    def abort(self, why: str) -> None:
        """Close the connections; gloo cannot pass on `why`."""
        self._group = None

    def close(self) -> None:
        self._group = None

    def _look_for_dead(self) -> None:
        for line, _ in self._hung_up.poll(0):
            raise RankLostError(f"the process of rank {self._ranks[line]} has died")

    def _gather(self, x: Tensor, wait_s: float | None) -> list[Tensor]:
        if self._group is None:
            raise RankLostError("the group of this process has been closed")
        found = [torch.empty_like(x) for _ in range(self.size)]
        options = AllgatherOptions()
        options.timeout = _LONGEST if wait_s is None else timedelta(seconds=wait_s)
        try:
            self._group.allgather([found], [x], options).wait()
        except RuntimeError as error:
            self._group = None
            self._look_for_dead()
            said = _first_line(error)
            raise RankLostError(f"another process has left, died or is late: {said}") from error
        return found


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
