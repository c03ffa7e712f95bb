"""Medusa: independent heads on one hidden state, head k guessing the token k + 2 places on.

z = h, then per layer z = z + SiLU(W z + b), then logits = U z. With `share_head`, which the
packaged head uses to stay small, U is the target's own head times a square matrix of each Medusa
head: SiLU hardly goes below zero, so blocks alone cannot take the next token out of h. Stateless:
it needs one hidden state and no KV.

Source: Cai et al. 2024 (arXiv 2401.10774) and the FasterDecoding checkpoints.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaShape:
    """Sizes; field names as in the published config.json where it has them."""

    hidden_size: int
    vocab_size: int
    medusa_num_heads: int
    medusa_num_layers: int = 1
    rank: int | None = None
    """Inner width of W = W_out W_in; None: one full matrix, as published."""
    share_head: bool = False
    """Whether U is the target's own head times a matrix of each head's."""


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b); W may be of low rank."""

    def __init__(self, shape: MedusaShape) -> None:
        """W and b start at zero, so that the block starts as the identity."""
        super().__init__()
        size, rank = shape.hidden_size, shape.rank
        self.down = None if rank is None else nn.Linear(size, rank, bias=False)
        self.linear = nn.Linear(rank or size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        inner = x if self.down is None else self.down(x)
        return x + F.silu(self.linear(inner))


class Medusa(nn.Module):
    """All heads; parameters are `blocks.K.L.linear.weight`, and `lm_heads.K.weight` or, where the
    target's head is shared, `mixers.K.weight`."""

    def __init__(self, shape: MedusaShape) -> None:
        """Identity blocks and matrices; heads are to be copied from the target's."""
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(shape) for _ in range(shape.medusa_num_layers)))
            for _ in range(shape.medusa_num_heads)
        )
        size, heads = shape.hidden_size, range(shape.medusa_num_heads)
        own, shared = (heads[:0], heads) if shape.share_head else (heads, heads[:0])
        self.lm_heads = nn.ModuleList(nn.Linear(size, shape.vocab_size, bias=False) for _ in own)
        self.mixers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in shared)
        for mixer in self.mixers:
            nn.init.eye_(mixer.get_parameter("weight"))

    def states(self, hidden: Tensor, count: int) -> Tensor:
        """What the first `count` heads make of the target's final hidden state, [..., count, D]."""
        states = [block(hidden) for block in list(self.blocks)[:count]]
        if self.shape.share_head:
            states = [mix(z) for mix, z in zip(list(self.mixers)[:count], states, strict=True)]
        return torch.stack(states, dim=-2)

    def logits(self, states: Tensor) -> Tensor:
        """[..., count, D] -> [..., count, V]; only where the heads are its own."""
        assert not self.shape.share_head, "the target's head is to be used"
        count = states.shape[-2]
        return torch.stack(
            [head(states[..., k, :]) for k, head in enumerate(list(self.lm_heads)[:count])], dim=-2
        )
