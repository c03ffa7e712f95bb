"""Mixtures by Triton's kernels, in the interpreter or on a GPU, against their twins. The guarded
bugs: a tie that falls elsewhere, a NaN that leaves its row, a pair in another expert's block, an
expert read for rows that are padding, a block lost where an expert has many pairs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import ExpertChoice, ExpertMatrices, ExpertPairs, GpuKernels
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.shape.mixtures.experts import Experts, Routing
from tests.unit.kernels.test_triton_matrix import weights
from tests.unit.kernels.triton_harness import DEVICE, normal, runs, tensor_cores, triton_kernels

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]
PLAIN = Experts(count=10, used=3, width=37, layers=(True,))
ROUTINGS = {
    "kept": PLAIN,
    "normalized": replace(PLAIN, routing=Routing(weights="normalized", eps=1e-3, scale=2.5)),
    "chosen": replace(
        PLAIN,
        routing=Routing(score="none", weights="softmax", bias=True),
        shared="always",
        shared_width=8,
    ),
    "biased choice": replace(
        PLAIN,
        routing=Routing(score="sigmoid", choice_bias=True, weights="normalized", floor=1.9),
        shared="gated",
        shared_width=8,
    ),
    "capped": replace(PLAIN, used=1, routing=Routing(score="none", weights="sigmoid", softcap=2.0)),
    "all": replace(PLAIN, count=4, used=4),
    "groups": replace(
        PLAIN,
        count=12,
        routing=Routing(score="sigmoid", choice_bias=True, groups=4, groups_used=2),
    ),
    "groups of two": replace(PLAIN, used=2, routing=Routing(groups=5, groups_used=1)),
}


def chosen(
    kernels: GpuKernels, experts: Experts, parts_PTX: Tensor, live: int
) -> tuple[Tensor, Tensor]:
    """Weights and experts of the rows."""
    rows = parts_PTX.shape[1]
    routing, count = experts.routing, experts.count
    choice = ExpertChoice(
        experts,
        torch.bfloat16,
        normal(1, count).bfloat16() if routing.bias else None,
        normal(2, count) if routing.choice_bias else None,
    )
    pairs = ExpertPairs.empty(rows, experts, DEVICE)
    live_1 = torch.tensor([live], dtype=torch.int32, device=DEVICE)
    kernels.choose_experts(parts_PTX, choice, live_1, pairs)
    return pairs.weights_TS, pairs.experts_TU


@pytest.mark.parametrize("name", ROUTINGS)
def test_choice(name: str) -> None:
    experts = ROUTINGS[name]
    products = normal(0, 2, 23, experts.count + (experts.shared == "gated"))
    products[1, :9] = 0.0
    products[0, :5] = torch.tensor([0.0, 1.0, -0.0, 3.0, -1.0], device=DEVICE)[:, None]  # Ties.
    products[0, 5:9, 1::2] = 0.5  # Half of them.
    found, wanted = (
        chosen(kernels, experts, products, 20) for kernels in (triton_kernels(), TwinKernels())
    )
    torch.testing.assert_close(found[0][:20], wanted[0][:20], rtol=1e-5, atol=1e-6)
    assert torch.equal(found[1], wanted[1])
    assert (found[1][20:] == experts.count).all()
    alone = chosen(triton_kernels(), experts, products[:, 7:8].contiguous(), 1)
    assert torch.equal(alone[0][0], found[0][7]) and torch.equal(alone[1][0], found[1][7])
    spoiled = products.clone()
    spoiled[0, 4, 3] = torch.nan
    after, twin = (
        chosen(kernels, experts, spoiled, 20) for kernels in (triton_kernels(), TwinKernels())
    )
    others = torch.arange(20, device=DEVICE) != 4
    assert torch.equal(after[0][:20][others], found[0][:20][others])
    assert after[0][4, : experts.used].isnan().any() and torch.equal(after[1], twin[1])


def sorted_pairs(kernels: GpuKernels, experts_TU: Tensor, count: int) -> tuple[ExpertPairs, int]:
    rows, used = experts_TU.shape
    experts = replace(PLAIN, count=count, used=used)
    room = ExpertPairs.empty(rows + 3, experts, DEVICE)
    room.blocks_B3.fill_(9)
    pairs, read_1 = room.of(rows, count, 16), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    pairs.experts_TU.copy_(experts_TU)
    kernels.sort_pairs(pairs, count, read_1)
    return pairs, int(read_1)


@pytest.mark.parametrize("rows", [1, 30, 400])
def test_pairs_are_sorted_into_blocks(rows: int) -> None:
    """Each pair of a live row in one block of its expert, in order; the list ends in its room."""
    draw = torch.Generator().manual_seed(rows)
    experts_TU = torch.stack([torch.randperm(9, generator=draw)[:4] for _ in range(rows)])
    experts_TU[experts_TU == 5] = 2  # Nobody has expert 5.
    experts_TU[rows - rows // 10 :] = 9
    experts_TU = experts_TU.to(DEVICE, torch.int32)
    found, read = sorted_pairs(triton_kernels(), experts_TU, 9)
    wanted, _ = sorted_pairs(TwinKernels(), experts_TU, 9)
    live = int((experts_TU < 9).sum())
    assert read == len(experts_TU[experts_TU < 9].unique())
    assert torch.equal(found.order_P[:live], wanted.order_P[:live])
    counts = wanted.blocks_B3[:, 2]
    assert torch.equal(found.blocks_B3[:, 2], counts) and int(counts.sum()) == live
    assert torch.equal(found.blocks_B3[counts > 0], wanted.blocks_B3[counts > 0])


def stacked(kind: str, outputs: int, inputs: int, spoiled: tuple[int, ...] = ()) -> ExpertMatrices:
    """One matrix of each of PLAIN's experts."""
    w = weights(kind, PLAIN.count * outputs, inputs, 0)
    for number in spoiled if kind == "floats" else ():
        w.values_NK[number * outputs : (number + 1) * outputs] = torch.nan
    return ExpertMatrices(w, normal(6, PLAIN.count * outputs))


def mixed(
    kernels: GpuKernels, experts: Experts, kind: str, x_TD: Tensor, experts_TU: Tensor,
    spoiled: tuple[int, ...] = (),
) -> Tensor:  # fmt: skip
    """What its experts give to each row, by slot: the bits of a block whatever its size."""
    rows, inner, width = len(x_TD), 64, x_TD.shape[1]
    tile = kernels.pair_tile(experts_TU.numel(), experts.count, 0 if kind == "floats" else 4)
    pairs = ExpertPairs.empty(rows, experts, DEVICE).of(rows, experts.count, tile)
    pairs.experts_TU.copy_(experts_TU)
    kernels.sort_pairs(pairs, experts.count, torch.zeros(1, dtype=torch.int32, device=DEVICE))
    y_PF = torch.zeros(rows * experts.used, inner, device=DEVICE)
    kernels.experts_gate_up(x_TD, stacked(kind, 2 * inner, width, spoiled), experts, pairs, y_PF)
    y_STD = torch.zeros(experts.used, rows, 40, device=DEVICE)
    kernels.experts_down(y_PF, stacked(kind, 40, inner, spoiled), experts, pairs, y_STD)
    return y_STD


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh", "clamped"])
@pytest.mark.parametrize("kind", ["floats", "8", "4g32z"])
def test_experts(kind: str, activation: Any) -> None:
    """The twin's numbers; a row's own bits; experts without rows and rows of padding are not
    read."""
    if kind != "floats" and activation == "gelu_pytorch_tanh":
        pytest.skip("activations know nothing of weights")
    experts, rows = replace(PLAIN, activation=activation, limit=0.8), 67
    draw = torch.Generator().manual_seed(5)
    # Expert 3 has nobody, expert 0 everybody.
    order_TU = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(rows)]) + 1
    order_TU[order_TU == 3] = 9
    experts_TU = torch.cat((torch.zeros(rows, 1), order_TU), 1).to(DEVICE, torch.int32)
    experts_TU[60:] = experts.count
    x_TD = normal(4, rows, 200)[:, 3:131]
    x_TD[60:] = torch.nan
    found = mixed(triton_kernels(), experts, kind, x_TD, experts_TU, spoiled=(3,))
    wanted = mixed(TwinKernels(), experts, kind, x_TD, experts_TU)
    size = wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * size)
    assert (found[:, 60:] == 0).all()
    for start, stop in ((0, 1), (33, 50)):
        part = slice(start, stop)
        own = mixed(triton_kernels(), experts, kind, x_TD[part], experts_TU[part], spoiled=(3,))
        assert torch.equal(own, found[:, part]), start
    x_TD[5] = torch.nan
    after = mixed(triton_kernels(), experts, kind, x_TD, experts_TU)
    others = torch.arange(rows, device=DEVICE) != 5
    assert after[:, 5].isnan().all() and torch.equal(after[:, others], found[:, others])
