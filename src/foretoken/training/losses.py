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

HEAD_ROWS = {"cpu": 512, "cuda": 4096}
"""Rows whose logits exist at once, by device: a vocabulary of 128,000 takes 256 MB for 512."""


def row_blocks(rows: Tensor) -> Iterator[slice]:
    """Slices that cover `rows` in order, as many a time as the device should hold logits of."""
    count, most = len(rows), HEAD_ROWS.get(rows.device.type, HEAD_ROWS["cpu"])
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


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
        for rows in row_blocks(hidden_RD):
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
    """The summed loss of some rows, its gradient by the draft's logits [R, V], and the overlap of
    the two distributions of each row [R]: the chance that a sampled draft is accepted."""

    loss: Tensor
    gradient: Tensor
    overlap: Tensor


def mixed_divergence(
    draft_RV: Tensor, target_RV: Tensor, tv_share: float, covered_R: Tensor | None = None
) -> LogitGradient:
    """(1 - tv_share) * KL(target, draft) + tv_share * TV, summed over float32 logit rows.

    Args:
        draft_RV: the draft's logits.
        target_RV: the target's, of the same tokens.
        tv_share: 0 to 1.
        covered_R: what the target gives to these tokens together, for overlaps; None: all of 1.
    """
    target_log = torch.log_softmax(target_RV, dim=-1)
    draft_log = torch.log_softmax(draft_RV, dim=-1)
    target, draft = target_log.exp(), draft_log.exp()
    kl = (target * (target_log - draft_log)).sum()
    gap = draft - target
    tv_R = 0.5 * gap.abs().sum(dim=-1)
    sign = 0.5 * gap.sign()
    tv_grad = draft * (sign - (draft * sign).sum(dim=-1, keepdim=True))
    gradient = (1 - tv_share) * gap + tv_share * tv_grad
    if covered_R is None:
        overlap_R = 1 - tv_R
    else:
        overlap_R = torch.minimum(target * covered_R[:, None], draft).sum(dim=-1)
    return LogitGradient((1 - tv_share) * kl + tv_share * tv_R.sum(), gradient, overlap_R)


class ChunkedDistillation(torch.autograd.Function):
    """Mean mixed divergence of draft rows from target rows, through vocabulary matrices.

    The draft's logits are the sum over pairs of rows [R, D] and a matrix [V, D]."""

    @staticmethod
    def forward(
        ctx: Any, target_RV_parts: Any, tv_share: float, *pairs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The mean, and each row's overlap [R].

        Args:
            ctx: of autograd.
            target_RV_parts: maps a slice of rows to the target's float32 logits, and to what it
                gives to their tokens together, or None.
            tv_share: as of `mixed_divergence`.
            pairs: rows and matrix, rows and matrix, ...
        """
        hidden, weights = pairs[0::2], pairs[1::2]
        count = len(hidden[0])
        by_hidden = [torch.empty_like(rows_RD) for rows_RD in hidden]
        learns = ctx.needs_input_grad[3::2]
        by_weight = [
            torch.zeros_like(weight_VD, dtype=torch.float32) if one else None
            for weight_VD, one in zip(weights, learns, strict=True)
        ]
        total = torch.zeros((), device=hidden[0].device)
        overlap_R = torch.empty(count, device=hidden[0].device)
        for rows in row_blocks(hidden[0]):
            parts = [(h[rows] @ w.T).float() for h, w in zip(hidden, weights, strict=True)]
            target_RV, covered_R = target_RV_parts(rows)
            loss, gradient, overlap_R[rows] = mixed_divergence(
                sum(parts[1:], parts[0]), target_RV, tv_share, covered_R
            )
            gradient = (gradient / count).to(weights[0].dtype)
            for i, weight_VD in enumerate(weights):
                by_hidden[i][rows] = gradient @ weight_VD
                if (found := by_weight[i]) is not None:
                    found += gradient.T @ hidden[i][rows]
            total += loss
        ctx.save_for_backward(*by_hidden, *by_weight)
        ctx.mark_non_differentiable(overlap_R)
        return total / count, overlap_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Scale the gradients that the forward pass left."""
        kept = [None if one is None else one * grads[0] for one in ctx.saved_tensors]
        half = len(kept) // 2
        pairs = zip(kept[:half], kept[half:], strict=True)
        return None, None, *(one for pair in pairs for one in pair)


class Head(NamedTuple):
    """Normed hidden rows [R, D] and the vocabulary matrix [V, D] that turns them into logits."""

    hidden: Tensor
    weight: Tensor


class Distance(NamedTuple):
    """How far a draft is from its target."""

    loss: Tensor
    """The mean divergence, in nats."""
    overlap: Tensor
    """Of each row the chance that a sampled draft is accepted, [R]; it has no gradient."""


def distance(
    draft: Head,
    target: Head,
    tv_share: float,
    *,
    added: Head | None = None,
    ids_V: Tensor | None = None,
) -> Distance:
    """The distance of `draft` from `target`; no gradient goes to the target.

    Args:
        draft: over its own tokens.
        target: over the same ones, or over all of the target's.
        tv_share: of total variation in the loss; the rest is KL divergence.
        added: other rows and their matrix, whose logits are added to the draft's.
        ids_V: where the target's matrix has all tokens, those that the draft's has. The loss
            compares the distributions over them; the overlap counts that the others are lost.
    """
    hidden, weight = target.hidden.detach(), target.weight.detach()
    device = draft.hidden.device.type
    kind = torch.float32
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
    hidden, weight = hidden.to(kind), weight.to(kind)

    def wanted(rows: slice) -> tuple[Tensor, Tensor | None]:
        logits_RV = (hidden[rows] @ weight.T).float()
        if ids_V is None:
            return logits_RV, None
        own_RV = logits_RV[:, ids_V]
        return own_RV, (own_RV.logsumexp(dim=-1) - logits_RV.logsumexp(dim=-1)).exp()

    heads = (draft,) if added is None else (draft, added)
    pairs = [one.to(kind) for head in heads for one in head]
    loss, overlap_R = ChunkedDistillation.apply(  # type: ignore[no-untyped-call]
        wanted, tv_share, *pairs
    )
    return Distance(loss, overlap_R)
