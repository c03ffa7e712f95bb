"""Which experts a row has, and their weights, from what a router makes of it.

Experts are chosen by larger score, then by lower number; a score that is no number comes first, so
that the row becomes none. A row's bits are its own.
"""

import torch
from torch import Tensor

from foretoken.ops.activation import sigmoid
from foretoken.shape.mixtures.experts import Routing


def route(
    product_TE: Tensor,
    used: int,
    routing: Routing,
    choice_bias_E: Tensor | None = None,
    scale_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights, float32 [T, K], and experts, int64 [T, K]: heaviest first, then by number.

    Args:
        product_TE: float32.
        used: experts of a row.
        routing: how they are chosen and weighed.
        choice_bias_E: float32, added to scores for the choice alone.
        scale_E: float32, what the weight of each expert is multiplied by at last.
    """
    if routing.softcap is not None:
        # c tanh(x / c), by operations that do the same to every number of a tensor.
        product_TE = (sigmoid(product_TE * (2 / routing.softcap)) * 2 - 1) * routing.softcap
    scores_TE = _scores(product_TE, routing.score)
    choosing_TE = scores_TE if choice_bias_E is None else scores_TE + choice_bias_E
    if routing.groups > 1:
        choosing_TE = _within_groups(choosing_TE, routing)
    chosen_TK = _best(choosing_TE, used).sort(dim=1).values
    weights_TK = _weights(scores_TE.gather(1, chosen_TK), routing)
    if scale_E is not None:
        weights_TK = weights_TK * scale_E[chosen_TK]
    order_TK = weights_TK.sort(dim=1, descending=True, stable=True).indices
    return weights_TK.gather(1, order_TK), chosen_TK.gather(1, order_TK)


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
