"""The processes of one run that torchrun started: who this one is, and what they agree on.

Owns the process group. It knows neither models nor data. Invariant: what `mean` and `lead` return
is the same on every rank, so that ranks which decide by it alone never part.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

Value = TypeVar("Value")

LONGEST_WAIT = timedelta(days=7)
"""For rank 0 while it lets the target answer; torchrun ends all ranks when one has failed."""


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
        """What `work` returned on rank 0; the others wait for it, and do nothing themselves."""
        if self.size == 1:
            return work()
        box: list[Value | None] = [work() if self.leads else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]  # type: ignore[return-value]

    def mean(self, *values: float) -> tuple[float, ...]:
        """The mean of each value over the ranks."""
        if self.size == 1:
            return values
        sums = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(sums)
        return tuple((sums / self.size).tolist())

    def align(self, model: nn.Module) -> None:
        """Give every rank the weights and buffers of rank 0."""
        if self.size > 1:
            with torch.no_grad():
                for tensor in (*model.parameters(), *model.buffers()):
                    dist.broadcast(tensor, src=0)

    def mean_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Leave the mean gradient in `parameters`, by one sum of a flat float32 tensor.

        A parameter that has a gradient on no rank stays without; on some: zeros on the others.
        """
        if self.size == 1:
            return
        trained = [p for p in parameters if p.requires_grad]
        with torch.no_grad():
            flat = torch.cat([_flat(p) for p in trained])
            dist.all_reduce(flat)
            pieces = flat.split([p.numel() + 1 for p in trained])
            for parameter, piece in zip(trained, pieces, strict=True):
                if piece[-1] > 0:
                    mean = (piece[:-1] / self.size).view_as(parameter)
                    parameter.grad = mean.to(parameter.dtype)


def _flat(parameter: nn.Parameter) -> Tensor:
    """A parameter's gradient, then 1 if there is one."""
    flat = torch.zeros(parameter.numel() + 1, device=parameter.device)
    if parameter.grad is not None:
        flat[:-1] = parameter.grad.flatten()
        flat[-1] = 1.0
    return flat


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
