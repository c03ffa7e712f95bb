"""What a fresh head takes from its target: sizes, embedding, output head.

Knows neither where the target runs nor the head. Invariant: `head_VD` times the hidden state after
the last norm gives the target's logits.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor

from foretoken.training.model import Llama


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetParts:
    """One target; names of sizes as in `LlamaShape`."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    embedding_VD: Tensor
    head_VD: Tensor
    norm_D: Tensor | None = None
    """Weights of the last norm, to begin with; None: begin with ones."""
    llama: Llama | None = None
    """The target itself, where it has the layout of the training code."""

    @classmethod
    def of_llama(cls, target: Llama) -> Self:
        """The parts of a frozen target of the training code's layout."""
        shape, table = target.shape, target.embed.weight.detach()
        return cls(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            layers=shape.layers,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            max_positions=shape.max_positions,
            norm_eps=shape.norm_eps,
            rope_theta=shape.rope_theta,
            embedding_VD=table,
            head_VD=table,
            norm_D=target.norm.weight.detach(),
            llama=target,
        )
