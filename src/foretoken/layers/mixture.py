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

from foretoken.layers.mlp import GatedMLP, gate
from foretoken.layers.norm import RMSNorm
from foretoken.ops.activation import ACTIVATIONS, clamped_swish, sigmoid, squared_relu
from foretoken.ops.linear import Linear
from foretoken.ops.mixture_kernel import ExpertCounter, MixtureKernel
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
    norm: RMSNorm | None = None
    """Of the rows before."""
    scale_E: Tensor | None = None
    """float32: what the weight of each expert is multiplied by at last."""

    def __call__(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights, float32 [T, K], and experts, int64 [T, K]: heaviest first, then by number."""
        routing = self.routing
        x_TD = x_TD if self.norm is None else self.norm(x_TD)
        product_TE = self.linear(x_TD.float() if routing.wide else x_TD).float()
        if routing.softcap is not None:
            # c tanh(x / c), by operations that do the same to every number of a tensor.
            product_TE = (sigmoid(product_TE * (2 / routing.softcap)) * 2 - 1) * routing.softcap
        scores_TE = _scores(product_TE, routing.score)
        choosing_TE = scores_TE if self.choice_bias_E is None else scores_TE + self.choice_bias_E
        if routing.groups > 1:
            choosing_TE = _within_groups(choosing_TE, routing)
        chosen_TK = _best(choosing_TE, self.used).sort(dim=1).values
        weights_TK = _weights(scores_TE.gather(1, chosen_TK), routing)
        if self.scale_E is not None:
            weights_TK = weights_TK * self.scale_E[chosen_TK]
        order_TK = weights_TK.sort(dim=1, descending=True, stable=True).indices
        return weights_TK.gather(1, order_TK), chosen_TK.gather(1, order_TK)


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
    kernel: MixtureKernel | None = None
    """All of it as one call; None: some part has no kernel."""
    counter: ExpertCounter | None = None
    """Is told how many experts were read."""

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """mixture(x), plus the residual if there is one."""
        if self.kernel is not None:
            return self.kernel(x_TD, residual_TD, counter=self.counter)
        return self.routed(x_TD, x_TD, residual_TD)

    def routed(self, x_TD: Tensor, by_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """The same where the router reads other rows, `by_TD`."""
        weights_TK, chosen_TK = self.router(by_TD)
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

    It reads the stream itself, so does the router.
    """

    mlp: GatedMLP
    mlp_norm: RMSNorm
    after_mlp: RMSNorm
    mixture: Mixture
    mixture_norm: RMSNorm
    after_mixture: RMSNorm

    def __call__(self, x_TD: Tensor, residual_TD: Tensor | None) -> Tensor:
        """Both, added."""
        assert residual_TD is None, "a norm comes before the sum with the stream"
        plain_TD = self.after_mlp(self.mlp(self.mlp_norm(x_TD), None))
        mixed_TD = self.mixture.routed(self.mixture_norm(x_TD), x_TD, None)
        return plain_TD + self.after_mixture(mixed_TD)


def _scores(product_TE: Tensor, kind: str) -> Tensor:
    if kind == "sigmoid":
        return sigmoid(product_TE)
    return product_TE if kind == "none" else _softmax(product_TE)


def _softmax(x_TE: Tensor) -> Tensor:
    """exp(x - max) over its sum; numbers are added in pairs from the ends of halves, so that the
    order does not depend on the number of rows."""
    powers = (x_TE - x_TE.amax(1, keepdim=True)).exp_()
    left, size = powers, 1 << (powers.shape[1] - 1).bit_length()
    if left.shape[1] < size:
        left = torch.nn.functional.pad(left, (0, size - left.shape[1]))
    while size > 1:
        size //= 2
        left = left[:, :size] + left[:, size:]
    return powers / left


def _within_groups(choosing_TE: Tensor, routing: Routing) -> Tensor:
    """Minus infinity outside the best groups: those whose two best experts score most."""
    grouped = choosing_TE.unflatten(1, (routing.groups, -1))
    two = grouped.sort(dim=2, descending=True).values[..., :2]
    best = _best(two[..., 0] + two[..., 1], routing.groups_used)
    outside = torch.ones(two.shape[:2], dtype=torch.bool, device=two.device)
    outside.scatter_(1, best, False)
    within: Tensor = grouped.masked_fill(outside[..., None], -torch.inf).flatten(1)
    return within


def _best(scores_TX: Tensor, count: int) -> Tensor:
    """Places of the largest; of equal ones the first. What is no number is larger than all."""
    return scores_TX.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _weights(scores_TK: Tensor, routing: Routing) -> Tensor:
    if routing.weights == "softmax":
        weights_TK = _softmax(scores_TK)
    elif routing.weights == "sigmoid":
        weights_TK = sigmoid(scores_TK)
    elif routing.weights == "normalized":
        total_T1 = scores_TK[:, :1].clone()
        for slot in range(1, scores_TK.shape[1]):
            total_T1 += scores_TK[:, slot : slot + 1]
        if routing.floor:
            total_T1.clamp_(min=routing.floor)
        weights_TK = scores_TK / (total_T1 + routing.eps)
    else:
        weights_TK = scores_TK
    return weights_TK if routing.scale == 1.0 else weights_TK * routing.scale


def inner_activation(experts: Experts) -> Callable[[Tensor], Tensor]:
    """From what an expert's `gate_up` gives to what its `down` takes."""
    if experts.activation == "clamped":
        return partial(clamped_swish, limit=experts.limit)
    if experts.activation == "relu2":
        return squared_relu
    activate = ACTIVATIONS[experts.activation]
    return lambda both_TF: gate(both_TF, activate)
