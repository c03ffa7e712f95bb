"""A mixture of experts as a GPU's launches: five before the sum, and two of a shared expert.

The matrices of its experts lie one over the other, so that a program finds its expert's by number.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    EXPERT_ACTIVATIONS,
    ExpertChoice,
    ExpertMatrices,
    ExpertPairs,
    GpuKernels,
    GpuWeights,
)
from foretoken.layers.mixture import Mixture
from foretoken.layers.mlp import GatedMLP
from foretoken.ops.activation import COMPILED
from foretoken.ops.linear.base import Linear
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.shape.mixtures.experts import Experts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMixture:
    """What kernels read of a layer's mixture."""

    choice: ExpertChoice
    router: GpuLinear
    """The gate of the shared expert is one more output."""
    gate_up: ExpertMatrices
    down: ExpertMatrices
    shared: tuple[GpuLinear, GpuLinear, int] | None
    """Gate over up, down, and the activation between."""

    @property
    def inner(self) -> int:
        """Numbers between the matrices of a row's experts, or of what they share."""
        shared = 0 if self.shared is None else self.shared[1].weights.inputs
        return max(self.choice.experts.used * self.down.weights.inputs, shared)

    def run(
        self,
        kernels: GpuKernels,
        x_TD: Tensor,
        live_1: Tensor,
        read_1: Tensor,
        room: tuple[ExpertPairs, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """What its experts give, float32 by slot and row, and the weights of that.

        Args:
            kernels: what is launched.
            x_TD: rows.
            live_1: int32, how many of them are none of padding.
            read_1: int32, written: how many experts were read.
            room: for pairs, for numbers between matrices, for float32 results.
        """
        experts, (rows, hidden) = self.choice.experts, x_TD.shape
        pairs, between, sums = room
        tile = kernels.pair_tile(rows * experts.used, experts.count, self.gate_up.weights.bits)
        pairs = pairs.of(rows, experts.count, tile)
        width, parts = self.router.weights.outputs, self.router.num_parts(rows)
        parts_PTE = sums[: parts * rows * width].view(parts, rows, width)
        self.router.run(x_TD, parts_PTE)
        kernels.choose_experts(parts_PTE, self.choice, live_1, pairs)
        kernels.sort_pairs(pairs, experts.count, read_1)
        y_STD = sums[: experts.results * rows * hidden].view(experts.results, rows, hidden)
        inner = self.down.weights.inputs
        y_PF = between[: rows * experts.used * inner].view(-1, inner)
        kernels.experts_gate_up(x_TD, self.gate_up, experts, pairs, y_PF)
        kernels.experts_down(y_PF, self.down, experts, pairs, y_STD)
        if self.shared is not None:
            up, down, activation = self.shared
            y_TF = between[: rows * down.weights.inputs].view(rows, -1)
            kernels.gate_up(x_TD, up.weights, up.bias_N, activation, y_TF)
            down.run(y_TF, y_STD[experts.used :])
        return y_STD, pairs.weights_TS


def knows_mixture(mixture: Mixture, experts: Experts) -> bool:
    """Whether a GPU's kernels have all parts of a mixture."""
    router, routing, shared = mixture.router, mixture.router.routing, mixture.shared
    if routing.expert_scales or routing.groups > 1:
        return False
    if experts.activation not in EXPERT_ACTIVATIONS:
        return False
    linears: list[Linear] = [router.linear]
    if mixture.shared_gate is not None:
        linears.append(mixture.shared_gate)
    if shared is not None:
        linears += [shared.gate_up, shared.down]
    ups, downs = ([getattr(one, name) for one in mixture.experts] for name in ("gate_up", "down"))
    known = all(isinstance(one, GpuLinear) for one in (*linears, *ups, *downs))
    known = known and (shared is None or shared.activate in COMPILED)
    return known and all(len({_kind(one.weights) for one in each}) == 1 for each in (ups, downs))


def _kind(w: GpuWeights) -> tuple[object, ...]:
    """What matrices that lie together have in common."""
    return w.values_NK.shape, w.bits, w.group, w.segment, w.zero_NG is None


def bind_mixture(mixture: Mixture, experts: Experts) -> GpuMixture:
    """The same for kernels; the matrices of experts become parts of one."""
    router, shared, gate = as_gpu(mixture.router.linear), mixture.shared, mixture.shared_gate
    choice = ExpertChoice(
        experts, router.weights.values_NK.dtype, router.bias_N, mixture.router.choice_bias_E
    )
    if gate is not None:
        router = router.over(as_gpu(gate))
    return GpuMixture(
        choice=choice,
        router=router,
        gate_up=_together([as_gpu(one.gate_up) for one in mixture.experts]),
        down=_together([as_gpu(one.down) for one in mixture.experts]),
        shared=None if shared is None else _bind_shared(shared),
    )


def _bind_shared(shared: GatedMLP) -> tuple[GpuLinear, GpuLinear, int]:
    return as_gpu(shared.gate_up), as_gpu(shared.down), COMPILED[shared.activate]


def as_gpu(linear: Linear) -> GpuLinear:
    """The same, of which it is known."""
    assert isinstance(linear, GpuLinear), type(linear).__name__
    return linear


def _together(linears: Sequence[GpuLinear]) -> ExpertMatrices:
    """One over the other; each becomes a view of that."""
    first, outputs = linears[0].weights, linears[0].weights.outputs

    def join(tensors: Iterable[Tensor | None]) -> Tensor | None:
        there = [one for one in tensors if one is not None]
        return torch.cat(there) if there else None

    whole = replace(
        first,
        values_NK=torch.cat([one.weights.values_NK for one in linears]),
        scale_NG=join(one.weights.scale_NG for one in linears),
        zero_NG=join(one.weights.zero_NG for one in linears),
    )
    for number, one in enumerate(linears):
        one.weights = whole.part(slice(number * outputs, (number + 1) * outputs))
    return ExpertMatrices(whole, join(one.bias_N for one in linears))
