"""The processes of one run: who this one is, and what they agree on.

Owns the process group; torchrun starts the processes. It knows neither models nor data. Invariant:
what `mean` and `lead` return is the same on every rank, so that ranks which decide by it alone
never part.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foretoken.errors import ForetokenError, TrainingError

Value = TypeVar("Value")

LONGEST_WAIT = timedelta(days=7)
"""Rank 0 lets the target answer while others wait; torchrun ends all ranks when one has failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among `size`; without torchrun it is alone."""

    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this one writes files and reports."""
        return self.rank == 0

    def lead(self, work: Callable[[], Value]) -> Value:
        """What `work` returned on rank 0; the others wait for it, and do nothing themselves. Raises
        ForetokenError: `work` did, on every rank."""
        if self.size == 1:
            return work()
        box: list[Any] = [None, None]
        error: ForetokenError | None = None
        try:
            box[0] = work() if self.leads else None
        except ForetokenError as raised:
            box[1], error = str(raised), raised
        dist.broadcast_object_list(box, src=0)
        if box[1] is not None:
            raise error or TrainingError(box[1])
        return box[0]  # type: ignore[no-any-return]

    def mean(self, *values: float) -> tuple[float, ...]:
        """The mean of each value over the ranks."""
        if self.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return tuple((sums / self.size).tolist())


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started, which it says in the environment."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield Ranks()
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=LONGEST_WAIT)
    try:
        yield Ranks(rank=dist.get_rank(), size=size)
        dist.barrier()  # nobody hangs up on one who still talks
    finally:
        dist.destroy_process_group()
