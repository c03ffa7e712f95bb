"""A group whose ranks compute on a CUDA device each, rank r on device r.

Messages go through the group of the host, as on a CPU; what layers compute goes from device to
device through a process group of PyTorch's, NCCL. Its gathers are queued, and nothing waits for
them but `finish`: there a rank that is lost is noticed, before anything of the step is handed out.
Unverified on GPUs: tests run the class over gloo, with tensors on the CPU.
"""

import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor

from foretoken.distributed.group import Group
from foretoken.errors import RankLostError

_LOOK_S: Final = 20e-6
_ABORT_S: Final = 5.0
"""NCCL's abort is known to hang at times."""

Done = Callable[[], bool]
"""Whether a device has come as far; waits for nothing."""


def group_on(device: str, host: Group) -> Group:
    """The group of ranks that compute on such devices; all of them must call it.

    Args:
        device: `cpu`, where it is `host` itself, or `cuda`.
        host: the ranks, as they exchange what lies on the CPU; belongs to what is returned.

    Raises:
        RankLostError: a rank left, died or was late.
    """
    if device == "cpu":
        return host
    torch.cuda.set_device(host.rank)
    # What fails on the device fails before others wait.
    first = torch.zeros(host.size, device=device)
    group = DeviceGroup(host, _nccl(host), _recorded)
    # NCCL connects when it is asked first, which may not be while a step is recorded.
    group.parts(first)
    group.exchange_into(first, torch.empty_like(first))
    group.finish()
    return group


@final
class DeviceGroup(Group):
    """The host's group, and beside it one for tensors of equal sizes on devices."""

    def __init__(self, host: Group, gathering: Any, record: Callable[[], Done]) -> None:
        """Put them together.

        Args:
            host: whose operations all but `parts` are.
            gathering: a backend of torch.distributed with the same ranks. It has no types.
            record: marks how far the work of this rank's device goes now.
        """
        self.rank, self.size = host.rank, host.size
        self._host, self._record = host, record
        self._gathering: Any = gathering
        self._ending = threading.Thread(target=self._abort, daemon=True)
        self._lock = threading.Lock()
        host.at_end = self._end

    @property
    def wait_s(self) -> float:
        return self._host.wait_s

    @wait_s.setter
    def wait_s(self, seconds: float) -> None:
        self._host.wait_s = seconds

    def swap(self, x: Tensor, wait_s: float | None) -> list[Tensor]:
        return self._host.swap(x, wait_s)

    def parts(self, x: Tensor) -> list[Tensor]:
        """One gather, queued behind what computes `x`, which has one shape and type on all ranks;
        valid as long as it is held."""
        found = x.new_empty((self.size, *x.shape))
        self.gather_into(x.contiguous(), found)
        return list(found.unbind(0))

    def gather_into(self, x: Tensor, found_RX: Tensor) -> None:
        """Queued, as all that devices do; can be recorded."""
        self._queue("_allgather_base", found_RX.view(-1), x.view(-1))

    def exchange_into(self, x_RX: Tensor, found_RX: Tensor) -> None:
        """The same."""
        self._queue("alltoall_base", found_RX.view(-1), x_RX.view(-1), [], [])

    def _queue(self, name: str, found: Tensor, x: Tensor, *sizes: list[int]) -> None:
        gathering = self._gathering
        if gathering is None:
            self.check()
            raise RankLostError("the group of this process has been closed")
        if x.numel():
            try:
                # On CUDA the queue of this rank's device waits, not this thread.
                getattr(gathering, name)(found, x, *sizes).wait()
            except RuntimeError as error:
                self.check()
                said = str(error).partition("\n")[0]
                raise RankLostError(f"devices cannot exchange tensors: {said}") from error

    def finish(self) -> None:
        """Look again and again, for `wait_s` at most: a gather that misses a rank never ends."""
        done, until = self._record(), time.monotonic() + self.wait_s
        while not done():
            self.check()
            if time.monotonic() > until:
                raise RankLostError(f"devices did not finish a step within {self.wait_s:g} s")
            time.sleep(_LOOK_S)
        self.check()  # Gathers that were aborted are done, too.

    def check(self) -> None:
        self._host.check()

    def abort(self, why: str) -> None:
        """On the host, and give up what is queued."""
        self._host.abort(why)
        self._end()
        self._ending.join(_ABORT_S)

    def close(self) -> None:
        """The same; an end by word is no reason to wait for devices."""
        self._host.close()
        self._end()
        self._ending.join(_ABORT_S)

    def _end(self) -> None:
        """In a thread of its own, since whoever calls it may not be held up."""
        with self._lock:
            if self._ending.ident is None:
                self._ending.start()

    def _abort(self) -> None:
        # Nobody else has it: its threads end here, and not while the interpreter does.
        gathering, self._gathering = self._gathering, None
        gathering.abort()


def store_of(host: Group) -> Any:
    """A store that all ranks reach, at rank 0; all of them must call it."""
    from foretoken.distributed.gloo import open_store, reach_store  # not every PyTorch has it

    if host.rank:
        return reach_store(int(host.broadcast(None)), host.size)
    store = open_store(host.size)
    host.broadcast(str(store.port).encode())
    return store


def _nccl(host: Group) -> Any:
    from torch._C._distributed_c10d import ProcessGroupNCCL  # only PyTorch for CUDA has it

    # Else its own watch ends the whole process, rank 0's with all requests, when a rank is lost.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    return ProcessGroupNCCL(store_of(host), host.rank, host.size, ProcessGroupNCCL.Options())


def _recorded() -> Done:
    event = torch.cuda.Event()
    event.record()
    return event.query
