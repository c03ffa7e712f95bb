"""The search in C against the one in NumPy: the same plan, to the last bit."""

from typing import Any

import numpy as np
import pytest

from foretoken.control.adaptive.allocation import Allocation, DraftOption, StepOptions, allocate
from foretoken.kernels.allocating import AllocationKernel
from foretoken.kernels.library import find_library

Random = np.random.Generator


@pytest.fixture(scope="module")
def kernel() -> AllocationKernel:
    found = find_library()
    if found is None:
        pytest.skip("no kernels here")
    return AllocationKernel(found)


def chains(random: Random, count: int, most: int, *, in_steps: bool) -> Any:
    """Chances that fall along each chain; of a few values alone, many are the same."""
    level = random.uniform(0.1, 0.98, (count, 1))
    chances = np.minimum(random.uniform(0.7, 1.05, (count, most)) * level, 1.0)
    if in_steps:
        chances = np.ceil(2.0 * chances) / 2.0
    return np.cumprod(chances, axis=1)


def trees(random: Random, count: int, most: int) -> tuple[Any, Any]:
    """Nodes with their parents first: chances [N, K] and levels [K]."""
    levels, chances = np.ones(most, np.int64), random.uniform(0.1, 0.95, (count, most))
    for node in range(1, most):
        parent = int(random.integers(-1, node))
        if parent >= 0:
            levels[node] = levels[parent] + 1
            chances[:, node] *= chances[:, parent]
    return chances, levels


def option(random: Random, count: int, most: int) -> DraftOption:
    levels = None
    if random.random() < 0.3:
        survival, levels = trees(random, count, most)
    else:
        survival = chains(random, count, most, in_steps=random.random() < 0.3)
    if levels is None and random.random() < 0.4:
        survival[np.arange(most) >= random.integers(0, most + 1, (count, 1))] = 0.0
    if random.random() < 0.2:
        survival[random.random(count) < 0.5] = 0.0
    passes = np.cumsum(random.uniform(0.0, 0.2, most + 1) * (random.random(most + 1) < 0.8))
    late = random.random(count) < 0.3
    return DraftOption(
        name=f"{random.random()}",
        survival_NK=survival,
        depth_s=np.maximum(passes - passes[0], 0.0),
        slot_s=float(random.choice([0.0, 0.001, 0.02])),
        start_s=np.where(late, random.uniform(0.0, 0.5, count), 0.0),
        levels_K=levels,
    )


def drawn(seed: int) -> tuple[StepOptions, list[DraftOption]]:
    """A step and its drafters, with all that makes steps differ."""
    random = np.random.default_rng(seed)
    count = int(random.choice([1, 2, 3, 4, 8, 16, 33, 64]))
    most, drafters = int(random.integers(1, 17)), int(random.integers(1, 6))
    options = [option(random, count, most) for _ in range(drafters)]
    row_s = random.choice([0.0, 0.002, 0.02, 0.1])
    rows = np.arange(1 + 3 * count * most)
    plain_s = 1.0
    rows_s = plain_s + row_s * (rows if random.random() < 0.5 else 4 * (rows // 4))
    slack = random.choice([np.inf, 0.0, 0.05, 0.5])
    uneven = random.uniform(0.0, 1.0, count) if random.random() < 0.5 else np.ones(count)
    step = StepOptions(
        rows_s=rows_s,
        plain_s=plain_s * float(random.choice([1.0, 0.98, 1.3])),
        bound_s=plain_s + slack * uneven if slack else np.full(count, plain_s),
        token_s=plain_s * random.choice([1.0, 1.15], count),
        margin=float(random.choice([0.0, 0.02])),
    )
    return step, options


def same(found: Allocation, wanted: Allocation) -> None:
    assert found.drafts_N.tolist() == wanted.drafts_N.tolist()
    assert found.drafter_N.tolist() == wanted.drafter_N.tolist()
    assert (found.slots is None) == (wanted.slots is None)
    if found.slots is not None and wanted.slots is not None:
        assert found.slots.tolist() == wanted.slots.tolist()
    for name in ("seconds", "tokens", "unguarded", "depth", "rate"):
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_plan_is_that_of_the_reference(kernel: AllocationKernel, first: int) -> None:
    for seed in range(first, first + 100):
        step, options = drawn(seed)
        same(kernel(step, options), allocate(step, options))
