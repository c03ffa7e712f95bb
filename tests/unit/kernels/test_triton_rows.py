"""What Triton's kernels do to rows between matrices, in the interpreter or on a GPU, against the
twin. The guarded bugs: a part, a bias or a residual lost or added twice, a head normed with another
head's weights, a row kept in another's slot, a rounding too many."""

from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    AddNorm,
    GpuKernels,
    Heads,
    Kept,
    KVLayer,
    QueryKeyNorm,
    Rotary,
)
from foretoken.ops.attention.gpu import layer_of
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.quantize_kv import dequantize
from tests.unit.kernels.triton_harness import DEVICE, normal, runs, tensor_cores, triton_kernels

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]
EPS = 1e-5
TYPES = [torch.float32, torch.bfloat16]


def close(found: Tensor, wanted: Tensor) -> None:
    """Up to the rounding of sums, which may go either way in a short type."""
    near = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


def both(run: Any) -> tuple[Any, Any]:
    return run(triton_kernels()), run(TwinKernels())


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", [0, 1, 3])
@pytest.mark.parametrize("after", [False, True])
def test_add_norm(dtype: torch.dtype, parts: int, after: bool) -> None:
    """Strided rows; what a drafter reads is kept, in columns of a wider store."""
    rows, width = 5, 72

    def run(kernels: GpuKernels) -> list[Tensor]:
        wide = normal(0, rows, 100).to(dtype)
        stream, normed = wide[:, 20 : 20 + width], torch.zeros(rows, 80, dtype=dtype, device=DEVICE)
        kept = torch.zeros(9, 3 * width, dtype=dtype, device=DEVICE)
        on = AddNorm(
            normal(1, parts, rows, width) if parts else None,
            normal(2, width).to(dtype) if parts == 3 else None,
            stream,
            1 + normal(3, width),
            normed[:, :width],
            EPS,
            after_D=normal(4, width).to(dtype) if after else None,
            kept=Kept(kept[:, width : 2 * width], ints(4, 0, 8, 2, 5)),
            kept_normed=Kept(kept[:, :width], ints(0, 1, 2, 3, 4)),
        )
        kernels.add_norm(on)
        return [wide, normed, kept]

    found, wanted = both(run)
    for one, other in zip(found, wanted, strict=True):
        close(one, other)
    if dtype == torch.float32 and not after:
        exact = [True, False, False]
        assert torch.equal(found[0], wanted[0]) == exact[0], "additions have one order"


@pytest.mark.parametrize("weighed", [False, True])
def test_add_norm_may_leave_out_the_norm(weighed: bool) -> None:
    """And may weigh each part of a row."""

    def run(kernels: GpuKernels) -> list[Tensor]:
        stream, normed = normal(0, 3, 40), torch.full((3, 40), 7.0, device=DEVICE)
        weights_TP = normal(5, 3, 2) if weighed else None
        parts_PTD = normal(1, 2, 3, 40)
        kernels.add_norm(AddNorm(parts_PTD, None, stream, None, normed, EPS, weights_TP=weights_TP))
        return [stream, normed]

    found, wanted = both(run)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_add_parts(dtype: torch.dtype) -> None:
    def run(kernels: GpuKernels) -> Tensor:
        y = torch.zeros(3, 1300, dtype=dtype, device=DEVICE)
        residual = normal(2, 3, 2000).to(dtype)[:, 5:1205]
        kernels.add_parts(normal(0, 4, 3, 1200), normal(1, 1200).to(dtype), residual, y[:, :1200])
        kernels.add_parts(normal(0, 1, 3, 100).to(dtype), None, None, y[:, 1200:])
        return y

    found, wanted = both(run)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_that_are_weighed_first_give_the_same_bits(dtype: torch.dtype) -> None:
    """As ranks do that have some columns of what experts give: weighed there, gathered, added."""
    parts_PTD, weights_TP = normal(1, 3, 4, 40), normal(5, 4, 3)

    def run(kernels: GpuKernels) -> Tensor:
        streams = normal(0, 4, 40).to(dtype).repeat(2, 1, 1)
        sums_TD, normed_TD = torch.zeros(4, 40, device=DEVICE), torch.zeros_like(streams[0])
        kernels.add_parts(parts_PTD, None, None, sums_TD, weights_TP)
        at_once = AddNorm(parts_PTD, None, streams[0], None, normed_TD, EPS, weights_TP=weights_TP)
        kernels.add_norm(at_once)
        kernels.add_norm(AddNorm(sums_TD[None], None, streams[1], None, normed_TD, EPS))
        return streams

    found, wanted = both(run)
    assert torch.equal(found, wanted) and torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", TYPES)
def test_embed_and_take(dtype: torch.dtype) -> None:
    def run(kernels: GpuKernels) -> list[Tensor]:
        y = torch.zeros(3, 4, 1200, dtype=dtype, device=DEVICE)
        table, which = normal(0, 11, 1200).to(dtype), ints(3, 10, 0, 3)
        kernels.embed(which, table, 1.0, y[0])
        kernels.embed(which, table, 17.5, y[1])
        kernels.take_rows(table, which, y[2])
        return list(y)

    found, wanted = both(run)
    assert torch.equal(torch.stack(found), torch.stack(wanted))


HEADS, KV_HEADS, SIZE = 4, 2, 24
"""A head that is no power of two."""


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("norm", "turned", "parts", "stored"),
    [
        (None, SIZE, 1, None),
        ("head", SIZE, 3, torch.int8),
        ("whole", 16, 2, None),
        (None, 8, 1, torch.int8),
    ],
)
def test_turn_and_write(
    dtype: torch.dtype, norm: str | None, turned: int, parts: int, stored: torch.dtype | None
) -> None:
    rows, width = 5, (HEADS + 2 * KV_HEADS) * SIZE
    angles = torch.outer(torch.arange(60.0), 1 / 100 ** (torch.arange(turned // 2) / turned))
    cos, sin = (torch.cat(pair, 1) for pair in ((angles.cos(),) * 2, (-angles.sin(), angles.sin())))
    scale = (1 + torch.arange(60) / 60).to(DEVICE, dtype) if turned == 16 else None
    rotary = Rotary(cos.to(DEVICE, dtype), sin.to(DEVICE, dtype), scale)
    norms = None
    if norm == "head":
        norms = QueryKeyNorm(1 + normal(2, SIZE), (1 + normal(3, SIZE)).to(dtype), EPS)
    if norm == "whole":
        sizes = HEADS * SIZE, KV_HEADS * SIZE
        norms = QueryKeyNorm(normal(2, sizes[0]), normal(3, sizes[1]), EPS, whole=True)

    def run(kernels: GpuKernels) -> list[Tensor]:
        q = torch.zeros(rows, HEADS, SIZE, dtype=dtype, device=DEVICE)
        cells = (9, 2 * KV_HEADS, SIZE)
        layer = KVLayer(torch.zeros(cells, dtype=stored or dtype, device=DEVICE))
        if stored is not None:
            layer = KVLayer(layer.numbers_SLh, torch.zeros(cells[:2], device=DEVICE))
        x_PTA = normal(0, parts, rows, width)
        x_PTA[0, 3, -SIZE:] = 0.0
        on = Heads(
            x_PTA,
            normal(1, width).to(dtype) if parts == 3 else None,
            norms,
            rotary,
            ints(0, 59, 7, 7, 31),
            ints(8, 0, 3, 1, 6),
            q,
            layer,
        )
        kernels.turn_and_write(on)
        kept = layer.numbers_SLh
        return [q, kept] if layer.scales_SL is None else [q, kept, layer.scales_SL]

    found, wanted = both(run)
    close(found[0], wanted[0])
    if stored is None:
        close(found[1], wanted[1])
    else:
        values = slice(KV_HEADS, None)
        assert torch.equal(found[1][:, values], wanted[1][:, values]), "values are only rounded"
        assert torch.equal(found[2][:, values], wanted[2][:, values])
        whole = [numbers.float() * scales[..., None] for numbers, scales in (found[1:], wanted[1:])]
        torch.testing.assert_close(*whole, rtol=0.05, atol=0.03)


def test_what_is_not_finite_shows_in_int8() -> None:
    x_PTA, whole = normal(0, 1, 1, 3 * 16), torch.zeros(1, 2, 20, dtype=torch.int8, device=DEVICE)
    x_PTA[0, 0, 40] = torch.inf
    layer = layer_of(whole)
    rotary = Rotary(torch.ones(1, 16, device=DEVICE), torch.zeros(1, 16, device=DEVICE))
    q = torch.zeros(1, 1, 16, device=DEVICE)
    triton_kernels().turn_and_write(Heads(x_PTA, None, None, rotary, ints(0), ints(0), q, layer))
    back = dequantize(whole, torch.float32)
    assert torch.isfinite(back[0, 0]).all() and back[0, 1].isnan().all()
