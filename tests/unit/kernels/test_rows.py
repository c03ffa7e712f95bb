"""Row kernels against their twins, on every instruction set of this machine. The guarded bugs: the
end of a row that is no whole vector, a row that depends on the others, a head turned twice or kept
in another slot."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from foretoken.control.adaptive.allocation import Allocation, DraftOption, StepOptions, allocate
from foretoken.kernels.allocating import AllocationKernel
from foretoken.kernels.library import Library, find_library
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import Rotation, rotate
from foretoken.ops.activation import Activation, gelu_tanh, sigmoid, silu
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.ops.row_operations import RowKernels, Turn, TurnNorms
from foretoken.shape.memory_formula import KV_SCALE_BYTES
from tests.marks import KERNEL_LEVELS, level_of

WIDTHS = [1, 3, 16, 31, 32, 33, 192, 200, 1037]
TOLERANCE = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (1.6e-2, 1e-2)}
DTYPES = list(TOLERANCE)


@pytest.fixture(scope="module", params=KERNEL_LEVELS)
def kernels(request: pytest.FixtureRequest) -> Iterator[RowKernels]:
    found: Library | None = find_library()
    level = level_of(request.param, found)
    if found is None or level > found.handle.ft_cpu_level():
        pytest.skip("no such kernels here")
    before = found.handle.ft_level()
    found.handle.ft_set_level(level)
    yield RowKernels(found)
    found.handle.ft_set_level(before)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, expected: Tensor) -> None:
    rtol, atol = TOLERANCE[found.dtype]
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(
    kernels: RowKernels, width: int, dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    if dtype == torch.float32 and weight_dtype != dtype:
        pytest.skip("norms of a float32 model have float32 weights")
    wide = randn(9, 2 * width, dtype=dtype)
    x_TD, weight_D = wide[:, :width], randn(width, dtype=weight_dtype, seed=1)
    residual_TD = randn(9, width, dtype=dtype, seed=2)
    norm = RMSNorm(weight_D, 1e-5)
    assert_close(kernels.norm(x_TD, weight_D, 1e-5), norm.reference(x_TD))
    found = kernels.norm(x_TD, weight_D, 1e-5, residual_TD)
    assert torch.equal(found, residual_TD + kernels.norm(x_TD, weight_D, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("activation", "twin"), [(0, silu), (1, gelu_tanh), (2, sigmoid)])
def test_gate(
    kernels: RowKernels, activation: int, twin: Activation, width: int, dtype: torch.dtype
) -> None:
    both_TF = 4 * randn(7, 2 * width, dtype=dtype)
    both_TF[0, 0] = -120.0
    wide = both_TF.float()
    expected = (twin(wide[:, :width]) * wide[:, width:]).to(dtype)
    assert_close(kernels.gate(both_TF, activation), expected)


def test_gate_at_the_ends(kernels: RowKernels) -> None:
    x = torch.tensor([[-torch.inf, -3e38, -200.0, -0.0, 200.0, 3e38, torch.nan]])
    for activation, far in ((0, -200 * 2**-126), (1, 0.0)):
        found = kernels.gate(torch.cat([x, torch.ones_like(x)], 1), activation)[0].tolist()
        assert abs(found[2]) <= abs(far) + 1e-30 and found[3:6] == [0.0, 200.0, x[0, 5].item()]
        assert found[6] != found[6]


@pytest.mark.parametrize("normed", ["", "before", "after"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv", "size", "turned"),
    [(6, 2, 32, 32), (4, 4, 8, 8), (3, 1, 10, 6), (2, 1, 128, 128), (2, 2, 80, 80), (1, 1, 96, 24)],
)
def test_turn_and_write(
    kernels: RowKernels, heads: int, kv: int, size: int, turned: int, dtype: torch.dtype,
    normed: str,
) -> None:  # fmt: skip
    rows = 11
    qkv_TAh = randn(rows, heads + 2 * kv, size, dtype=dtype)
    angles = torch.arange(rows)[:, None, None] * randn(1, 1, turned, dtype=torch.float32, seed=4)
    rotation = Rotation(angles.cos().to(dtype), angles.sin().to(dtype))
    norms: TurnNorms | None = None
    expected = qkv_TAh.clone()
    parts = (slice(heads), slice(heads, heads + kv), slice(heads + kv, None))
    after = normed == "after"
    if normed:
        query, key, value = (randn(size, dtype=torch.float32, seed=i) for i in (5, 6, 7))
        norms = TurnNorms(query, key, value if after else None, 1e-6, after)
    for one in ("turn", "norm") if after else ("norm", "turn"):
        if one == "turn":
            expected[:, : heads + kv] = rotate(expected[:, : heads + kv], rotation)
        for part, weight_h in zip(
            parts, norms[:3] if norms and one == "norm" else (), strict=False
        ):
            if weight_h is not None:
                expected[:, part] = RMSNorm(weight_h, 1e-6).reference(expected[:, part])
    scattered = torch.tensor(random.Random(0).sample(range(50), rows))
    for slots_T in (scattered, slice(7, 7 + rows)):
        store_SKh = torch.full((50, 2 * kv, size), 7.0, dtype=dtype)
        found = qkv_TAh.clone()
        turn = Turn(
            num_heads=heads, num_kv_heads=kv, cos_TW=rotation.cos, sin_TW=rotation.sin,
            slots_T=slots_T, norms=norms,
        )  # fmt: skip
        kernels.turn_and_write(found.view(rows, -1), store_SKh, turn)
        assert_close(found, expected)
        assert torch.equal(store_SKh[slots_T], found[:, heads:])
        store_SKh[slots_T] = 7.0
        assert (store_SKh == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 10, 16, 24, 64, 80, 130])
def test_int8_has_the_bits_of_the_twin(kernels: RowKernels, size: int, dtype: torch.dtype) -> None:
    """Of small, large, zero and spoiled heads, on every instruction set."""
    rows, heads, kv = 13, 3, 2
    qkv_TAh = randn(rows, heads + 2 * kv, size, dtype=dtype)
    qkv_TAh *= 10.0 ** torch.arange(-6, 7)[:, None, None]
    qkv_TAh[3, heads + 1], qkv_TAh[4, heads + 2] = 0.0, 1e-38
    qkv_TAh[5, heads + 3, size // 2], qkv_TAh[6, heads + 2, -1] = torch.nan, -torch.inf
    turned = torch.ones(rows, 1, size, dtype=dtype)
    turn = Turn(
        num_heads=heads, num_kv_heads=kv, cos_TW=turned, sin_TW=0 * turned,
        slots_T=slice(3, 3 + rows), norms=None,
    )  # fmt: skip
    store_SKh = torch.full((20, 2 * kv, size + KV_SCALE_BYTES), 7, dtype=torch.int8)
    kernels.turn_and_write(qkv_TAh.view(rows, -1), store_SKh, turn)
    both = store_SKh[3 : 3 + rows], quantize_kv(qkv_TAh[:, heads:], torch.int8)
    assert torch.equal(*(kept[..., :size] for kept in both))
    scales = [kept[..., size:].contiguous().view(torch.float32) for kept in both]
    assert torch.equal(*(scale.nan_to_num(nan=-1.0) for scale in scales))
    assert int(scales[0].isnan().sum()) == 2
    assert (store_SKh[:3] == 7).all() and (store_SKh[3 + rows :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_independent(kernels: RowKernels, dtype: torch.dtype) -> None:
    """A thousand rows at once, on several threads, have the bits of one at a time."""
    x_TD, weight_D = randn(1000, 98, dtype=dtype), randn(98, dtype=dtype, seed=1)
    library = find_library()
    assert library is not None
    library.handle.ft_set_threads(3)
    normed, gated = kernels.norm(x_TD, weight_D, 1e-6), kernels.gate(x_TD, 0)
    library.use_threads(library.cores)
    for i in range(0, 1000, 37):
        assert torch.equal(kernels.norm(x_TD[i : i + 1], weight_D, 1e-6)[0], normed[i])
        assert torch.equal(kernels.gate(x_TD[i : i + 1], 0)[0], gated[i])


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


def option(random: Random, count: int, most: int) -> DraftOption:
    survival = chains(random, count, most, in_steps=random.random() < 0.3)
    if random.random() < 0.4:
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
    assert found.lengths_N.tolist() == wanted.lengths_N.tolist()
    assert found.drafter_N.tolist() == wanted.drafter_N.tolist()
    for name in ("seconds", "tokens", "unguarded", "depth", "rate"):
        assert getattr(found, name) == getattr(wanted, name), name


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_plan_is_that_of_the_reference(kernel: AllocationKernel, first: int) -> None:
    for seed in range(first, first + 100):
        step, options = drawn(seed)
        same(kernel(step, options), allocate(step, options))
