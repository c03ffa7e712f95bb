"""Tokens chosen by Triton's kernels, in the interpreter or on a GPU, against `ops.sampling` and the
twin. The guarded bugs: another id of equals, noise of another row or id, an id whose noise rounds
to nothing and is always drawn."""

import random

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import Draw, GpuKernels
from foretoken.ops.drawing import Drawing
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.logits import Filters, keep_filtered
from foretoken.ops.noise import KeyedNoise, pack_keys
from foretoken.ops.sampling import draw
from tests.unit.filters import FILTERS
from tests.unit.kernels.triton_harness import DEVICE, normal, runs, tensor_cores, triton_kernels

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]
ROWS, VOCABULARY = 7, 9000
"""More than a program reads."""
FEWER = 2500


def keys() -> Tensor:
    return pack_keys([random.Random(row).getrandbits(64) for row in range(ROWS)], DEVICE)


def drawn(
    kernels: GpuKernels, logits: Tensor, heat: float | list[float], names: Tensor | None = None
) -> Tensor:
    how = torch.zeros(ROWS, 4, device=DEVICE)
    how[:, 0] = torch.tensor(heat)
    wide = torch.zeros(ROWS, 3, dtype=torch.int32, device=DEVICE)
    kernels.draw(Draw(logits, keys(), how, wide[:, 1], names))
    return wide[:, 1]


def test_the_draw_is_that_of_sampling() -> None:
    logits = normal(0, ROWS, VOCABULARY) * 3
    wanted = draw(logits / 0.75, keys(), KeyedNoise(VOCABULARY, DEVICE))
    assert drawn(triton_kernels(), logits, 0.75).tolist() == wanted.tolist()


def test_greedy_rows_beside_drawn_ones_and_other_names() -> None:
    logits = normal(1, ROWS, VOCABULARY)
    logits[0] = -torch.inf
    logits[1, [8700, 17, 8300]] = 50.0
    heat = [0.0, 0.0, 1.0, 0.0, 0.3, 0.0, 2.0]
    names = torch.randperm(20000, generator=torch.Generator().manual_seed(0))[:VOCABULARY]
    for other in (None, names.to(DEVICE, torch.int32)):
        found, wanted = (drawn(k, logits, heat, other) for k in (triton_kernels(), TwinKernels()))
        assert found.tolist() == wanted.tolist()
        assert found[:2].tolist() == ([0, 17] if other is None else names[[0, 17]].tolist())


def test_the_least_noise_is_not_zero() -> None:
    """An id whose exponential noise is 2 ** -32 has a bonus of 22, not of infinity."""
    word = 0x2468ACE1
    # The key with which the hash of id 5 is 0.
    before = word * pow(0x85EBCA6B, -1, 1 << 32) % (1 << 32)
    key = ((before ^ before >> 16) - 5) % (1 << 32) | word << 32
    packed = pack_keys([key], DEVICE)
    noise = KeyedNoise(VOCABULARY, DEVICE)
    assert noise.exponential(packed)[0, 5] < 2.0**-31
    for other, wanted in ((20.0, 5), (60.0, 7)):
        logits = torch.zeros(1, VOCABULARY, device=DEVICE)
        logits[0, 7] = other
        logits[0, 8:] = -100.0
        token = torch.zeros(1, dtype=torch.int32, device=DEVICE)
        triton_kernels().draw(Draw(logits, packed, torch.ones(1, 4, device=DEVICE), token))
        assert token.tolist() == [wanted] == draw(logits, packed, noise).tolist()


@pytest.mark.parametrize("kind", ["apart", "flat", "equal", "banned"])
def test_filters_leave_what_those_of_logits_leave(kind: str) -> None:
    """Cuts near the best and far below it, among equals, among ids that are forbidden."""
    logits = normal(3, len(FILTERS), FEWER) * (0.01 if kind == "flat" else 4)
    if kind == "equal":
        logits = logits.round()
    if kind == "banned":
        logits[:, 1::3] = -torch.inf
        logits[3] = -torch.inf
    how = torch.tensor([Drawing.of(0.75, one) for one in FILTERS], device=DEVICE)
    how[4, 0] = 0
    found, twin = (torch.zeros(len(FILTERS), 3, device=DEVICE) for _ in range(2))
    triton_kernels().keep(logits, how, found)
    TwinKernels().keep(logits, how, twin)
    torch.testing.assert_close(found, twin, rtol=1e-6, atol=0)
    scaled = logits / 0.75
    scaled[4] = logits[4]
    filters = [one or (0.0, 0, 1.0) for one in FILTERS]
    filters[4] = (0.0, 0, 1.0)
    wanted = keep_filtered(scaled, Filters.of(filters, FEWER, DEVICE))
    kept = scaled.masked_fill(scaled < found[:, 2:], -torch.inf)
    weight = (scaled - scaled.amax(-1, keepdim=True)).double().exp().nan_to_num()
    # Sums in float32 may be wrong about an id that begins where the share is reached.
    other = weight.masked_fill(kept == wanted, 0)
    assert (other.sum(-1) - other.amax(-1) <= 1e-6 * weight.sum(-1)).all()
    assert torch.equal(kept[:-1], wanted[:-1])
    mass = weight.masked_fill(kept == -torch.inf, 0).sum(-1)
    torch.testing.assert_close(found[:, 1].double(), mass, rtol=1e-5, atol=0)
    tokens = torch.zeros(len(FILTERS), dtype=torch.int32, device=DEVICE)
    many = pack_keys(list(range(len(FILTERS))), DEVICE)
    drawn = draw(wanted, many, KeyedNoise(FEWER, DEVICE))
    drawn[4] = logits[4].argmax()
    for kernels in (triton_kernels(), TwinKernels()):
        kernels.draw(Draw(logits, many, how, tokens, None, found))
        assert tokens.tolist() == drawn.tolist()


def test_chance_and_cap() -> None:
    logits = normal(2, ROWS, VOCABULARY) * 4
    found, wanted = torch.zeros(ROWS, device=DEVICE), torch.zeros(ROWS, device=DEVICE)
    triton_kernels().chance(logits, found)
    TwinKernels().chance(logits, wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    alone = torch.zeros(1, device=DEVICE)
    triton_kernels().chance(logits[3:4], alone)
    assert torch.equal(alone, found[3:4])
    capped = logits.clone()
    triton_kernels().cap(capped, 5.0)
    torch.testing.assert_close(capped, (logits / 5).tanh() * 5, rtol=1e-5, atol=1e-5)
