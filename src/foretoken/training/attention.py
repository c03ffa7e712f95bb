"""Causal attention and the chunked output head, as training on a CPU wants them.

Owns two functions with the same results as their plain forms: attention in query blocks (which a
compiler fuses, and which skips the masked half) and a cross entropy that never holds the
logits of all rows at once. Neither knows about the model around it.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERY_BLOCK = 128
LONGEST_BLOCKED = 1024
HEAD_ROWS = 512


def blocked_attention(query_NTd: Tensor, key_NTd: Tensor, value_NTd: Tensor) -> Tensor:
    """Causal attention on [B * H, T, head_dim] with explicit scores, a block of queries a time."""
    length, dim = query_NTd.shape[1:]
    query_NTd = query_NTd * dim**-0.5
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores = torch.bmm(query_NTd[:, start:end], key_NTd[:, :end].transpose(1, 2)).float()
        seen = torch.ones(end - start, end, dtype=torch.bool, device=scores.device).tril(start)
        weights = torch.softmax(scores.masked_fill(~seen, -1e30), dim=-1)
        outputs.append(torch.bmm(weights.to(value_NTd.dtype), value_NTd[:, :end]))
    return torch.cat(outputs, dim=1)


def causal_attention(query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor) -> Tensor:
    """Causal attention, [B, H, T, head_dim] each; the fastest known form for the length."""
    length, on_cpu = query_BHTd.shape[2], query_BHTd.device.type == "cpu"
    if not on_cpu or length > LONGEST_BLOCKED or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(query_BHTd, key_BHTd, value_BHTd, is_causal=True)
    flat = (x.flatten(0, 1) for x in (query_BHTd, key_BHTd, value_BHTd))
    return blocked_attention(*flat).view(query_BHTd.shape)


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
