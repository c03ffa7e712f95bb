"""What processes of collectives.py and tensor_parallel.py exchange; they import it by this name."""

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from foretoken.distributed import Group
from foretoken.distributed.gloo import GlooGroup

BYTES = (256, 4 << 10, 32 << 10, 256 << 10, 4 << 20)
MESSAGE = bytes(1024)
GATHER, TELL = "gathers", "messages"


def gather_and_time(group: Group, known: bool, times: int, file: str) -> None:
    """Time every size; rank 0 writes the medians and tenth percentiles, in microseconds.

    Args:
        group: the ranks.
        known: let gloo gather without the labels that say how much comes.
        times: of the smallest sizes; large ones take part of them.
        file: where the JSON goes.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, float]] = {}
    for size in BYTES:
        x = torch.ones(1, size // 2, dtype=torch.bfloat16)
        found[f"gather {size}"] = _timed(_gather(group, x, known), times, size)
    if not known:
        message = None if group.rank else MESSAGE
        found[f"broadcast {len(MESSAGE)}"] = _timed(
            lambda: group.broadcast(message), times, len(MESSAGE)
        )
    if group.rank == 0:
        Path(file).write_text(json.dumps(found), encoding="utf-8")


def _gather(group: Group, x: torch.Tensor, known: bool) -> Callable[[], object]:
    if not known:
        return lambda: group.all_gather(x, 1)
    assert isinstance(group, GlooGroup), type(group)
    raw = x.view(torch.uint8)
    return lambda: torch.cat(group._gather(raw, group.wait_s), 1)


def _timed(call: Callable[[], object], times: int, size: int) -> dict[str, float]:
    count = max(5, times // (1 + size // (64 << 10)))
    for _ in range(count // 5):
        call()
    spent = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        spent.append((time.perf_counter() - began) * 1e6)
    tenth = statistics.quantiles(spent, n=10)[0]
    return {"median": statistics.median(spent), "tenth": tenth}


class Exchanges:
    """A context, inside which a group's calls are counted and timed."""

    def __init__(self, group: Group) -> None:
        """Of a rank's group."""
        self._group = group
        self.calls: list[tuple[str, int]] = []
        """Kind and bytes of its part, in order."""
        self.seconds = 0.0

    def __enter__(self) -> "Exchanges":
        """Stand before `swap`, which all that a group does goes through."""
        swap = self._group.swap

        def timed(x: torch.Tensor, wait_s: float | None) -> list[torch.Tensor]:
            began = time.perf_counter()
            found = swap(x, wait_s)
            self.seconds += time.perf_counter() - began
            # Messages are bytes; what is computed is not.
            self.calls.append((TELL if x.dtype == torch.uint8 else GATHER, x.nbytes))
            return found

        vars(self._group)["swap"] = timed
        return self

    def __exit__(self, *raised: object) -> None:
        """Stand aside."""
        del vars(self._group)["swap"]

    def begin(self) -> None:
        """Another step."""
        self.calls, self.seconds = [], 0.0


def exchange_alone(group: Group, calls: list[tuple[str, int]], times: int) -> float:
    """Median milliseconds of these exchanges one after the other, with nothing computed between
    them, so that nobody is late; on every rank."""
    torch.set_num_threads(1)
    parts = {size: torch.ones(1, max(1, size // 2), dtype=torch.bfloat16) for _, size in calls}

    def step() -> None:
        for kind, size in calls:
            if kind == GATHER:
                group.swap(parts[size], group.wait_s)
            else:
                group.broadcast(None if group.rank else bytes(size))

    spent = []
    for _ in range(5 + times):
        began = time.perf_counter()
        step()
        spent.append((time.perf_counter() - began) * 1e3)
    return statistics.median(spent[5:])
