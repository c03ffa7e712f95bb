"""The processes of one run: who this one is, what they agree on, and how a run gets several.

Owns the process group. torchrun starts the processes, or `launch` does for a config with `helpers`.
It knows neither models nor data. Invariant: what `mean` and `lead` return is the same on every
rank, so that ranks which decide by it alone never part.
"""

import os
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from foretoken.errors import ConfigError, ForetokenError, TrainingError
from foretoken.training.settings import Settings

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
        """What `work` returned on rank 0; the others wait for it, and do nothing themselves.

        Raises:
            ForetokenError: `work` did, on every rank.
        """
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


def is_alone() -> bool:
    """Whether nobody has started further processes for this run yet."""
    return _size() == 1


def _size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process among those that torchrun started, which it says in the environment."""
    size = _size()
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


def shared_out(settings: Settings) -> Settings:
    """What each process of a run with helpers does: its share of the tokens of a step.

    Raises:
        ConfigError: a step cannot be cut into that many equal shares of whole rows.
    """
    share, rest = divmod(settings.batch_tokens, settings.helpers + 1)
    parts = {max(settings.micro_tokens, stage.length) for stage in settings.stages}
    if rest or any(share % part for part in parts):
        wanted = " and ".join(str(part) for part in sorted(parts))
        allowed = f"helpers + 1 equal shares of batch_tokens {settings.batch_tokens}, multiples of"
        raise ConfigError("helpers", settings.helpers, f"{allowed} {wanted}")
    return replace(settings, batch_tokens=share, helpers=0)


def launch(processes: int, run: Callable[..., Value], *given: Any) -> Value:
    """Let `processes` ranks on this machine call `run(*given)`; what rank 0 returned.

    Raises:
        TrainingError: `run` raised an error of ours, whose message and exit code it has; or a
            process failed, which ends the others.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    try:
        found: dict[int, Value | _Failed] = elastic_launch(config, _one_thread)(run, *given)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        raise TrainingError(f"process {failure.local_rank}: {failure.message}") from error
    if isinstance(found[0], _Failed):
        failed = TrainingError(found[0].message)
        failed.exit_code = found[0].exit_code
        raise failed
    return found[0]


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error on its way to the process that started this one; errors themselves cannot travel."""

    message: str
    exit_code: int


def _one_thread(run: Callable[..., Value], *given: Any) -> Value | _Failed:
    """Processes that share the cores of a machine would wait for each other's threads."""
    torch.set_num_threads(1)
    try:
        return run(*given)
    except ForetokenError as error:
        if isinstance(error, TrainingError) and os.environ.get("LOCAL_RANK") == "0":
            # Other ranks may still be at work and fail without it; then theirs is what is reported.
            print(f"foretoken: {error}", file=sys.stderr)
        return _Failed(str(error), error.exit_code)
