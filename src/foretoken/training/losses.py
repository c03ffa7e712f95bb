"""The two losses of training, and their gradients, without the logits of all rows at once.

Cross entropy counts the row's own tokens. The divergence is the distance between a target's
next-token distribution and a draft's: the chance that a draft token is accepted is 1 - TV
(Leviathan et al. 2023), so total variation is mixed with the forward KL divergence, which is
smoother far from the optimum (Zhou et al. 2023, DistillSpec). Neither knows the model.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

HEAD_ROWS = 512
"""Rows whose logits exist at once: a vocabulary of 128,000 takes 256 MB for so many."""


def row_blocks(count: int) -> Iterator[slice]:
    """Slices of at most HEAD_ROWS rows that cover 0..count-1 in order."""
    for start in range(0, count, HEAD_ROWS):
        yield slice(start, min(start + HEAD_ROWS, count))


class ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`, a few rows at a time.

    The gradients are computed in the forward pass, so the logits of a chunk are dropped at once.
    """

    @staticmethod
    def forward(ctx: Any, hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor) -> Tensor:
        """Mean loss in nats; rows whose target is negative count nothing."""
        count = (targets_R >= 0).sum().clamp(min=1)
        hidden_grad = torch.empty_like(hidden_RD)
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32)
        total = torch.zeros((), device=hidden_RD.device)
        for rows in row_blocks(len(hidden_RD)):
            hidden, targets = hidden_RD[rows], targets_R[rows]
            kept, safe = (targets >= 0)[:, None], targets.clamp(min=0)[:, None]
            logits = (hidden @ weight_VD.T).float()
            norm = logits.logsumexp(dim=-1, keepdim=True)
            total += ((norm - logits.gather(1, safe)) * kept).sum()
            grad = logits.sub_(norm).exp_()
            grad.scatter_add_(1, safe, torch.full_like(norm, -1.0))
            grad = (grad * (kept / count)).to(weight_VD.dtype)
            hidden_grad[rows] = grad @ weight_VD
            weight_grad += grad.T @ hidden
        ctx.save_for_backward(hidden_grad, weight_grad)
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        """Scale the gradients that the forward pass left."""
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grads[0], weight_grad * grads[0], None


def head_loss(hidden_RD: Tensor, weight_VD: Tensor, targets_R: Tensor) -> Tensor:
    """Mean cross entropy in nats of rows [R, D] against the tied head [V, D].

    Under autocast the product runs in the autocast type. Targets below 0 do not count.
    """
    device = hidden_RD.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        hidden_RD, weight_VD = hidden_RD.to(kind), weight_VD.to(kind)
    loss: Tensor = ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden_RD, weight_VD, targets_R
    )
    return loss


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
