"""A mixture of experts in place of an MLP: one call where all of it has kernels, else PyTorch's
operations and any linear layers.

A row's bits are its own, in whatever company it is computed. Its scores are made alone. Experts are
chosen by larger score, then by lower number; a score that is no number comes first, so that the row
becomes none, and no other does. What the chosen give is added heaviest first, then by number, in
float32, then the shared expert, then the residual; it is rounded once. Experts that no row chooses
are not read. This order is what kernels keep too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from foretoken.layers.gathered import GatheredMixture
from foretoken.layers.mlp import GatedMLP, gate
from foretoken.layers.norm import RMSNorm
from foretoken.ops.activation import ACTIVATIONS, clamped_swish, sigmoid, squared_relu
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import ExpertCounter, MixtureKernel
from foretoken.ops.routing import route
from foretoken.shape.mixtures.experts import Experts, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    """Which experts a row has, and their weights."""

    linear: Linear
    """[T, D] -> [T, E]."""
    used: int
    routing: Routing
    choice_bias_E: Tensor | None = None
    """float32."""
    scale_E: Tensor | None = None
    """float32: what the weight of each expert is multiplied by at last."""

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, K], and experts, int64 [T, K]: heaviest first, then by number."""
        routing = self.routing
        product_TE = self.linear(x_TD.float() if routing.wide else x_TD).float()
        return route(product_TE, self.used, routing, self.choice_bias_E, self.scale_E)


@dataclass(frozen=True, slots=True)
class Expert:
    """The matrices of one expert: gate over up, or up alone, and down."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """x [T, D] -> [T, D]."""

    router: Router
    experts: tuple[Expert, ...]
    activate: Callable[[Tensor], Tensor]
    """From what `gate_up` gives to what `down` takes."""
    shared: GatedMLP | None = None
    """An MLP of all rows."""
    shared_gate: Linear | None = None
    """[T, D] -> [T, 1]: its sigmoid multiplies the shared expert."""
    kernel: MixtureKernel | GatheredMixture | None = None
    """All of it as one call; None: some part has no kernel."""
    counter: ExpertCounter | None = None
    """Is told how many experts were read."""

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, by_TD: Tensor | None = None
    ) -> Tensor:
        """mixture(x), plus the residual if there is one; `by_TD`: what the router reads in place of
        x."""
        if self.kernel is not None:
            return self.kernel(x_TD, residual_TD, by_TD=by_TD, counter=self.counter)
        weights_TK, chosen_TK = self.router(x_TD if by_TD is None else by_TD)
        each_TKD = self._each(x_TD, chosen_TK)
        total_TD = each_TKD[:, 0] * weights_TK[:, :1]
        for slot in range(1, chosen_TK.shape[1]):
            total_TD += each_TKD[:, slot] * weights_TK[:, slot : slot + 1]
        if self.shared is not None:
            beside_TD = self.shared(x_TD, None).float()
            if self.shared_gate is not None:
                beside_TD = beside_TD * sigmoid(self.shared_gate(x_TD).float())
            total_TD += beside_TD
        if residual_TD is not None:
            total_TD += residual_TD.float()
        return total_TD.to(x_TD.dtype)

    def _each(self, x_TD: Tensor, chosen_TK: Tensor) -> Tensor:
        """What each expert gives to each row that chose it, float32 [T, K, D]."""
        rows, used = chosen_TK.shape
        by_expert, order_P = chosen_TK.flatten().sort(stable=True)
        touched, counts = by_expert.unique_consecutive(return_counts=True)
        each_PD = x_TD.new_empty((rows * used, x_TD.shape[1]), dtype=torch.float32)
        pairs = order_P.split(counts.tolist())
        if self.counter is not None:
            self.counter.total.value += len(pairs)
        for number, pairs_P in zip(touched.tolist(), pairs, strict=True):
            expert = self.experts[number]
            inner = self.activate(expert.gate_up(x_TD[pairs_P // used]))
            each_PD[pairs_P] = expert.down(inner).float()
        return each_PD.view(rows, used, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureBeside:
    """A plain MLP and a mixture beside it, each between norms of its own (Gemma 4).

    It reads the stream itself; the router reads that under a third norm.
    """

    mlp: GatedMLP
    mlp_norm: RMSNorm
    after_mlp: RMSNorm
    mixture: Mixture
    router_norm: RMSNorm
    mixture_norm: RMSNorm
    after_mixture: RMSNorm

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """Both, added."""
        assert residual_TD is None, "a norm comes before the sum with the stream"
        plain_TD = self.after_mlp(self.mlp(self.mlp_norm(x_TD), None))
        mixed_TD = self.mixture(self.mixture_norm(x_TD), None, self.router_norm(x_TD))
        return self.after_mixture(mixed_TD, plain_TD)


def inner_activation(experts: Experts) -> Callable[[Tensor], Tensor]:
    """From what an expert's `gate_up` gives to what its `down` takes."""
    if experts.activation == "clamped":
        return partial(clamped_swish, limit=experts.limit)
    if experts.activation == "relu2":
        return squared_relu
    activate = ACTIVATIONS[experts.activation]
    return lambda both_TF: gate(both_TF, activate)
