"""Matrices by Triton's kernels, in the interpreter or on a GPU. The guarded bugs: a tail of rows,
outputs or inputs lost, halves of a group exchanged, a scale or zero point of another group, a sum
that depends on the number of rows or on who adds its segments."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.kernels.gpu_kernels import GpuKernels, GpuWeights
from foretoken.layers.gathered_gpu import SegmentsLinear
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.linear.gpu import WholeLinear, pack_for_gpu
from tests.unit.kernels.triton_harness import DEVICE, normal, runs, tensor_cores, triton_kernels

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]
SHAPES = [(40, 203, 0), (70, 512, 256), (24, 640, 256)]
"""Outputs, inputs, segment: inputs that no step divides, two segments, and a shorter last one."""


def weights(
    kind: str, outputs: int, inputs: int, segment: int, dtype: torch.dtype = torch.float32
) -> GpuWeights:
    """`floats`, `wide` ones, or bits, `g` and the group, and `z` for zero points."""
    segment = segment or inputs
    if kind in ("floats", "wide"):
        values_NK = normal(0, outputs, inputs).to(dtype if kind == "floats" else torch.float32)
        return GpuWeights(values_NK=values_NK, segment=segment, inputs=inputs)
    bits, group = int(kind[0]), int(kind.rstrip("z")[2:] or inputs)
    shape = (outputs, inputs // 2 if bits == 4 else inputs)
    low, high, of = (0, 256, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
    drawn = torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1))
    groups = outputs, inputs // group
    scale_NG = (normal(2, *groups) / (64 if bits == 8 else 4)).half()
    return GpuWeights(
        values_NK=drawn.to(DEVICE, of),
        segment=segment,
        inputs=inputs,
        scale_NG=scale_NG if "g" in kind else scale_NG.float(),
        zero_NG=(normal(3, *groups) * 3 + bits).half() if kind.endswith("z") else None,
        bits=bits,
    )


def parts_of(kernels: GpuKernels, x_TK: Tensor, w: GpuWeights, long: bool = False) -> Tensor:
    parts_PTN = torch.full(
        (1 if long else w.segments, x_TK.shape[0], w.outputs), torch.nan, device=DEVICE
    )
    (kernels.linear_long if long else kernels.linear_splits)(x_TK, w, parts_PTN)
    return parts_PTN


def added(parts_PTN: Tensor) -> Tensor:
    total = parts_PTN[0].clone()
    for part in parts_PTN[1:]:
        total += part
    return total


KINDS = ["floats", "wide", "8", "8g16z", "8g32", "8g64", "4g32", "4g32z", "4g64", "4g128z"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_twin(kind: str) -> None:
    for outputs, inputs, segment in SHAPES if kind in ("floats", "8") else SHAPES[1:2]:
        for dtype in (torch.float32, torch.bfloat16):
            w = weights(kind, outputs, inputs, segment, dtype)
            x_TK = normal(4, 19, inputs + 5).to(dtype)[:, 3 : inputs + 3]
            found, wanted = (
                parts_of(kernels, x_TK, w) for kernels in (triton_kernels(), TwinKernels())
            )
            size = wanted.abs().max().item()
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6 * size)


@pytest.mark.parametrize("kind", ["floats", "8", "4g32z"])
def test_a_rows_bits_are_its_own(kind: str) -> None:
    """Alone, among few, among many, and where one program adds the segments."""
    outputs, inputs, segment = 40, 640, 256
    w, kernels = weights(kind, outputs, inputs, segment), triton_kernels()
    x_TK = normal(4, 67, inputs)
    together = added(parts_of(kernels, x_TK, w))
    for start, stop in ((0, 1), (33, 34), (60, 66), (11, 31)):
        part = added(parts_of(kernels, x_TK[start:stop], w))
        assert torch.equal(part, together[start:stop]), (start, stop)
    assert torch.equal(parts_of(kernels, x_TK, w, long=True)[0], together)
    spoiled_TK = x_TK.clone()
    spoiled_TK[3] = torch.nan
    others = torch.arange(67, device=DEVICE) != 3
    assert torch.equal(added(parts_of(kernels, spoiled_TK, w))[others], together[others])


@pytest.mark.parametrize("activation", [0, 1])
@pytest.mark.parametrize("kind", ["floats", "8", "4g32z"])
def test_gate_and_up(kind: str, activation: int) -> None:
    """The twin's numbers, a row's own bits, and each sum as `linear_splits` has it."""
    outputs, inputs, segment = 2 * 37, 512, 256
    w, kernels = weights(kind, outputs, inputs, segment), triton_kernels()
    x_TK, bias_N = normal(4, 19, inputs), normal(5, outputs)

    def gated(of: Any, x_TK: Tensor) -> Tensor:
        y_TF = torch.full((len(x_TK), outputs // 2), torch.nan, device=DEVICE)
        of.gate_up(x_TK, w, bias_N, activation, y_TF)
        return y_TF

    found, wanted = gated(kernels, x_TK), gated(TwinKernels(), x_TK)
    size = wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=5e-6 * size)
    assert torch.equal(gated(kernels, x_TK[7:8]), found[7:8])
    gate_TF, up_TF = (added(parts_of(kernels, x_TK, w)) + bias_N).chunk(2, -1)
    if activation == 0:
        torch.testing.assert_close(found, F.silu(gate_TF) * up_TF, rtol=1e-6, atol=1e-6 * size)


def test_segments_belong_to_the_shape() -> None:
    """Enough programs for few rows, and never by the number of rows; whole groups each; four or
    eight where several GPUs share a matrix, of one length if that can be."""
    kernels = triton_kernels()
    for outputs, inputs, segments in (
        (6144, 4096, 4), (4096, 4096, 4), (28672, 4096, 1), (4096, 14336, 4), (128256, 4096, 1),
        (2048, 2048, 8), (64, 300, 1), (3584, 3584, 4), (8192, 8192, 8), (1536, 8960, 14),
        (8192, 28672, 8), (5120, 25600, 8), (8192, 29568, 8),
    ):  # fmt: skip
        segment = kernels.segment_of(outputs, inputs, 4)
        assert -(-inputs // segment) == segments, (outputs, inputs, segment)
        assert segments == 1 or segment % 128 == 0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_cards_share_a_model_of_70b(ranks: int) -> None:
    """Key heads and the inputs of the inner width: all of them, in whole segments, in order."""
    kernels = triton_kernels()
    for inputs, whole in ((64 * 128, 8 * 128), (28672, 128)):
        values_NK = torch.empty(8192, inputs, dtype=torch.bfloat16, device="meta")
        linear = WholeLinear(kernels, pack_for_gpu(kernels, values_NK))
        groups: list[Any] = [SimpleNamespace(rank=rank, size=ranks) for rank in range(ranks)]
        shares = [SegmentsLinear(linear, group) for group in groups]
        each = inputs // ranks
        assert [one.own_inputs for one in shares] == [
            range(rank * each, (rank + 1) * each) for rank in range(ranks)
        ]
        assert {one.segments for one in shares} == {8} and each % whole == 0
    with pytest.raises(ConfigError, match=r"one of \[1, 2, 4, 8\], .* 8192 x 28672 has 8 segments"):
        SegmentsLinear(linear, SimpleNamespace(rank=0, size=16))  # type: ignore[arg-type]
