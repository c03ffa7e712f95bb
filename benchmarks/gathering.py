"""What the processes of benchmarks/collectives.py do; they import it by this name."""

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
