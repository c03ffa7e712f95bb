"""The distance between a target's next-token distribution and a draft's.

Owns the loss and its gradient, chunk by chunk, so that only a few rows of logits exist at once.
The chance that a draft token is accepted is 1 - TV (Leviathan et al. 2023), so TV is mixed with
the forward KL divergence, which is smoother far from the optimum (Zhou et al. 2023, DistillSpec).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foretoken.training.attention import row_blocks


class LogitGradient(NamedTuple):
    """The summed loss of some rows and its gradient by the draft's logits [R, V]."""

    loss: Tensor
    gradient: Tensor


def mixed_divergence(draft_RV: Tensor, target_RV: Tensor, tv_share: float) -> LogitGradient:
    """(1 - tv_share) * KL(target, draft) + tv_share * TV, summed over float32 logit rows."""
    target_log = torch.log_softmax(target_RV, dim=-1)
    draft_log = torch.log_softmax(draft_RV, dim=-1)
    target, draft = target_log.exp(), draft_log.exp()
    kl = (target * (target_log - draft_log)).sum()
    gap = draft - target
    tv = 0.5 * gap.abs().sum()
    sign = 0.5 * gap.sign()
    tv_grad = draft * (sign - (draft * sign).sum(dim=-1, keepdim=True))
    gradient = (1 - tv_share) * gap + tv_share * tv_grad
    return LogitGradient((1 - tv_share) * kl + tv_share * tv, gradient)


class ChunkedDistillation(torch.autograd.Function):
    """Mean mixed divergence of draft rows [R, D] from target rows, through both tied heads."""

    @staticmethod
    def forward(
        ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, target_RV_parts: Any, tv_share: float
    ) -> Tensor:
        """`target_RV_parts` maps a slice of rows to the target's float32 logits."""
        count = len(hidden_RD)
        hidden_grad = torch.empty_like(hidden_RD)
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        total = torch.zeros((), device=hidden_RD.device)
        for rows in row_blocks(count):
            hidden = hidden_RD[rows]
            logits = (hidden @ weight_VD.T).float()
            loss, gradient = mixed_divergence(logits, target_RV_parts(rows), tv_share)
            gradient = (gradient / count).to(weight_VD.dtype)
            hidden_grad[rows] = gradient @ weight_VD
            weight_grad += gradient.T @ hidden
            total += loss
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Scale the gradients that the forward pass left."""
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None, None


class Head(NamedTuple):
    """Normed hidden rows [R, D] and the vocabulary matrix [V, D] that turns them into logits."""

    hidden: Tensor
    weight: Tensor


def distillation_loss(draft: Head, target: Head, tv_share: float) -> Tensor:
    """The mean divergence of `draft` from `target`, in nats; no gradient goes to the target."""
    hidden, weight = target.hidden.detach(), target.weight.detach()
    device = draft.hidden.device.type
    kind = torch.float32
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    hidden, weight = hidden.to(kind), weight.to(kind)
    loss: Tensor = ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        draft.hidden.to(kind),
        draft.weight.to(kind),
        lambda rows: (hidden[rows] @ weight.T).float(),
        tv_share,
    )
    return loss
