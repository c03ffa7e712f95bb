"""Whether a draft model's weights become int8: decided by timing a few draft steps at load.

What a draft proposes is checked either way, so this choice changes speed and never the output.
Knows no configs; `draft_models` calls it for `quantization="auto"`.
"""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.kernels.library import find_library
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout
from foretoken.runtime.runner import Runner

logger = logging.getLogger("foretoken")

_STEPS, _REPEATS = 8, 9


def load_cheaper(load: Callable[[Path, str | None], Runner], folder: Path) -> Runner:
    """The draft model, with int8 weights if its steps are then faster beyond the noise.

    Both are in memory while they are timed, in turns; the loser is dropped. Without compiled
    kernels integer weights are multiplied out and cannot pay, and off the CPU nobody knows yet
    how to time them: nothing is timed.
    """
    whole = load(folder, None)
    on_cpu = whole.model.embedding_VD.device.type == "cpu"
    if find_library() is None or not on_cpu:
        why = "without kernels of ours integers are multiplied out, which saves no time"
        why = why if on_cpu else "draft steps are timed on a CPU only"
        logger.info("draft %s: unrounded weights (auto): %s", folder.name, why)
        return whole
    rounded = load(folder, "int8")
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(_REPEATS + 1):
        for runner, found in zip((whole, rounded), times, strict=True):
            seconds = _time_steps(runner)
            if turn:
                found.append(seconds)
    wins = pays(*times)
    ratio = statistics.median(times[1]) / statistics.median(times[0])
    logger.info(
        "draft %s: %s weights (auto): a draft step takes %.2f of its time with int8",
        folder.name,
        "int8" if wins else "unrounded",
        ratio,
    )
    return rounded if wins else whole


def pays(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether `after` is less in all turns but one in eight, and 3 % less in the median turn.

    With nine turns, equal arms pass in one case of fifty (sign test).
    """
    ratios = sorted(b / a for a, b in zip(before, after, strict=True))
    enough = len(ratios) - len(ratios) // 8
    return ratios[enough - 1] < 1.0 and statistics.median(ratios) < 0.97


def _time_steps(runner: Runner) -> float:
    """Seconds of some greedy draft steps of one sequence, over the first page."""
    steps = min(_STEPS, runner.page_size)
    began = time.perf_counter()
    layout = SpanLayout(start=0, num_tokens=1, page_table=[0])
    if runner.roll_out([layout], [[0]], plan_best(1, steps)) is None:
        for at in range(steps):
            layout = SpanLayout(start=at, num_tokens=1, page_table=[0])
            runner.forward_last([layout], [[0]])
    return time.perf_counter() - began
