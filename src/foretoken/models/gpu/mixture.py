"""A mixture of experts as a GPU's launches: five before the sum, and two of a shared expert.

The matrices of its experts lie one over the other, so that a program finds its expert's by number.
Where bits are promised, the device is asked whether rows keep theirs in any company.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import (
    EXPERT_ACTIVATIONS,
    Devices,
    ExpertChoice,
    ExpertMatrices,
    ExpertPairs,
    GpuKernels,
)
from foretoken.layers.gathered import GatheredLinear
from foretoken.layers.gathered_gpu import gather_columns, own_columns
from foretoken.layers.mixture import Mixture
from foretoken.layers.mlp import GatedMLP
from foretoken.ops.activation import COMPILED
from foretoken.ops.gpu.probe import wrong_companies
from foretoken.ops.linear.base import Linear
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.shape.mixtures.experts import Experts


@final
@dataclass(frozen=True, slots=True)
class GpuMLP:
    """What kernels read of a plain MLP, or of a shared expert."""

    gate_up: GpuLinear
    down: GpuLinear
    activation: int
    """Between them."""
    ranks: Devices | None = None
    """Have columns of both matrices' outputs each; None: this device has what `down` reads."""

    @property
    def inner(self) -> int:
        """Numbers between them."""
        return self.down.weights.inputs

    def results(self, rows: int, hidden: int) -> int:
        """float32 numbers that there is to be room for."""
        return hidden * max(self.down.most_parts, rows)

    def gated(self, kernels: GpuKernels, x_TD: Tensor, room: Tensor) -> Tensor:
        """What `down` reads, [T, F]."""
        y_TF = room[: len(x_TD) * self.inner].view(len(x_TD), self.inner)
        own_TF = own_columns(self.ranks, y_TF)
        kernels.gate_up(x_TD, self.gate_up.weights, self.gate_up.bias_N, self.activation, own_TF)
        gather_columns(kernels, self.ranks, own_TF, y_TF)
        return y_TF


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMixture:
    """What kernels read of a layer's mixture."""

    choice: ExpertChoice
    router: GpuLinear
    """The gate of the shared expert is one more output."""
    gate_up: ExpertMatrices
    down: ExpertMatrices
    shared: GpuMLP | None
    ranks: Devices | None
    """Have columns of each expert's outputs; None: all is here."""

    @property
    def inner(self) -> int:
        """Numbers between the matrices of a row's experts, or of what they share."""
        shared = 0 if self.shared is None else self.shared.inner
        return max(self.choice.experts.used * self.down.weights.inputs, shared)

    def results(self, rows: int, hidden: int) -> int:
        """float32 numbers that there is to be room for."""
        router = self.router.outputs * max(self.router.most_parts, rows)
        return max(router, self.choice.experts.results * rows * hidden)

    def run(
        self,
        kernels: GpuKernels,
        x_TD: Tensor,
        live_1: Tensor,
        read_1: Tensor,
        room: tuple[ExpertPairs, Tensor, Tensor],
        tile: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """What its experts give, float32 by slot and row, and the weights of that; of several
        ranks the sum of what is weighed.

        Args:
            kernels: what is launched.
            x_TD: rows.
            live_1: int32, how many of them are none of padding.
            read_1: int32, written: how many experts were read.
            room: for pairs, for numbers between matrices, for float32 results.
            tile: pairs of a block; 0: as the kernels would have it.
        """
        experts, (rows, hidden) = self.choice.experts, x_TD.shape
        (pairs, between, sums), bits = room, self.gate_up.weights.bits
        tile = tile or kernels.pair_tile(rows * experts.used, experts.count, bits)
        pairs = pairs.of(rows, experts.count, tile)
        width, parts = self.router.weights.outputs, self.router.num_parts(rows)
        parts_PTE = sums[: parts * rows * width].view(parts, rows, width)
        self.router.run(x_TD, parts_PTE)
        kernels.choose_experts(parts_PTE, self.choice, live_1, pairs)
        kernels.sort_pairs(pairs, experts.count, read_1)
        inner, width = self.down.weights.inputs, self.down.weights.outputs // experts.count
        y_STD = sums[: experts.results * rows * width].view(experts.results, rows, width)
        y_PF = between[: rows * experts.used * inner].view(-1, inner)
        own_PF = own_columns(self.ranks, y_PF)
        kernels.experts_gate_up(x_TD, self.gate_up, experts, pairs, own_PF)
        gather_columns(kernels, self.ranks, own_PF, y_PF)
        kernels.experts_down(y_PF, self.down, experts, pairs, y_STD)
        if self.shared is not None:
            self.shared.down.run(self.shared.gated(kernels, x_TD, between), y_STD[experts.used :])
        if self.ranks is None:
            return y_STD, pairs.weights_TS
        own_TD, y_TD = y_STD.new_empty(rows, width), y_STD.new_empty(rows, hidden)
        kernels.add_parts(y_STD, None, None, own_TD, pairs.weights_TS)
        gather_columns(kernels, self.ranks, own_TD, y_TD)
        return y_TD[None], None

    def give(self, kernels: GpuKernels, x_TD: Tensor, padding: int = 0, tile: int = 0) -> Tensor:
        """The same in memory of its own, beside so many rows of padding: of each row what there is
        to be added, weighed, [T, S, D]."""
        live, hidden = x_TD.shape
        x_TD = torch.cat((x_TD, x_TD.new_full((padding, hidden), torch.nan)))
        live_1, read_1 = x_TD.new_tensor([[live], [0]], dtype=torch.int32)
        room = (
            ExpertPairs.empty(len(x_TD), self.choice.experts, x_TD.device),
            x_TD.new_empty(len(x_TD) * self.inner),
            x_TD.new_empty(self.results(len(x_TD), hidden), dtype=torch.float32),
        )
        y_STD, weights_TS = self.run(kernels, x_TD, live_1, read_1, room, tile)
        y_TSD = y_STD.transpose(0, 1)[:live]
        return y_TSD if weights_TS is None else y_TSD * weights_TS[:live, :, None]

    def why_bits_differ(self, kernels: GpuKernels, like_XD: Tensor) -> str | None:
        """What gave a row of this type and width other bits in other company; None: nothing did."""
        most, ranks = kernels.pair_tile(1 << 20, 1, self.gate_up.weights.bits), self.ranks
        wrong_C = wrong_companies(partial(self.give, kernels), like_XD, most)
        if ranks is not None:
            found_RC = wrong_C.new_empty(ranks.size, len(wrong_C))
            kernels.gather(ranks, wrong_C, found_RC)
            wrong_C = found_RC.amax(0)
        return next((f"experts of {rows} rows" for rows in wrong_C.tolist() if rows), None)


def bind_mlp(mlp: GatedMLP, ranks: Devices | None = None) -> GpuMLP | None:
    """The same for kernels; None: they have no such activation or matrix.

    `ranks`: of a shared expert, those that have some outputs of both matrices.
    """
    activation, gate_up, down = COMPILED.get(mlp.activate), mlp.gate_up, _own(mlp.down, ranks)
    if activation is None or not isinstance(gate_up, GpuLinear) or not isinstance(down, GpuLinear):
        return None
    return GpuMLP(gate_up, down, activation, ranks)


def _own(linear: Linear, ranks: Devices | None) -> Linear:
    """What of it is on this rank."""
    return linear.own if ranks is not None and isinstance(linear, GatheredLinear) else linear


def bind_mixture(
    mixture: Mixture, experts: Experts, ranks: Devices | None = None
) -> GpuMixture | None:
    """The same for kernels, the matrices of experts as parts of one; None: they do not have all.

    `ranks`: those that have some outputs each of the matrices; None: they are whole.
    """
    router, routing, gate = mixture.router.linear, mixture.router.routing, mixture.shared_gate
    shared = None if mixture.shared is None else bind_mlp(mixture.shared, ranks)
    if (
        routing.expert_scales
        or experts.activation not in EXPERT_ACTIVATIONS
        or not isinstance(router, GpuLinear)
        or not isinstance(gate, GpuLinear | None)
        or (shared is None) != (mixture.shared is None)
    ):
        return None
    widths = (experts.width, experts.shared_width, router.weights.inputs)
    if ranks is not None and any(width % ranks.size for width in widths):
        return None
    choice = ExpertChoice(
        experts, router.weights.values_NK.dtype, router.bias_N, mixture.router.choice_bias_E
    )
    router = router if gate is None else router.over(gate)
    up = _together([one.gate_up for one in mixture.experts])
    down = _together([_own(one.down, ranks) for one in mixture.experts])
    if up is None or down is None:
        return None
    return GpuMixture(
        choice=choice, router=router, gate_up=up, down=down, shared=shared, ranks=ranks
    )


def _together(linears: Sequence[Linear]) -> ExpertMatrices | None:
    """One over the other; each becomes a view of that. None: they are not alike."""
    ours = [one for one in linears if isinstance(one, GpuLinear)]
    kinds = {
        (w.values_NK.shape, w.bits, w.group, w.segment, w.zero_NG is None)
        for w in (one.weights for one in ours)
    }
    if len(ours) < len(linears) or len(kinds) != 1:
        return None
    first, outputs = ours[0].weights, ours[0].weights.outputs

    def join(tensors: Iterable[Tensor | None]) -> Tensor | None:
        there = [one for one in tensors if one is not None]
        return torch.cat(there) if there else None

    whole = replace(
        first,
        values_NK=torch.cat([one.weights.values_NK for one in ours]),
        scale_NG=join(one.weights.scale_NG for one in ours),
        zero_NG=join(one.weights.zero_NG for one in ours),
    )
    for number, one in enumerate(ours):
        one.weights = whole.part(slice(number * outputs, (number + 1) * outputs))
    return ExpertMatrices(whole, join(one.bias_N for one in ours))
