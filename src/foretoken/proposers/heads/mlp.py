"""The MLP speculator: a small recurrent net from one hidden state to n tokens.

s_i = GELU(LN_i(P_i s_{i-1} + (w_e / w_s) Emb_i[token_i])), logits_i = Head_i s_i, with s_{-1} the
target's last hidden state after its final norm, token_0 the newest token, w_s = 0.5^(0.5 / n) and
w_e = sqrt((1 - w_s^2) D / 2). Stateless: it needs one hidden state and no KV.

Source: Wertheimer et al. 2024 (arXiv 2404.19124) and IBM's accelerator checkpoints.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPShape:
    """Field names as in the published config.json."""

    vocab_size: int
    emb_dim: int
    """Hidden size of the target."""
    inner_dim: int
    n_predict: int
    tie_weights: bool = False
    """One embedding, head and norm for all stages, one projection for all but the first."""
    scale_input: bool = False
    """Whether the target's state is normalised and divided by sqrt(2) first."""


class ScaledNorm(nn.Module):
    """x / sqrt(mean(x^2) + 1e-6), then scale and shift."""

    def __init__(self, size: int) -> None:
        """Start as plain normalisation."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return torch.addcmul(self.bias, normalised(x), self.weight)


def normalised(x: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + 1e-6) over the last dimension."""
    return F.rms_norm(x, (x.shape[-1],), None, 1e-6)


class MLPSpeculator(nn.Module):
    """Stages share one module where weights are tied, as their state dict does."""

    def __init__(self, shape: MLPShape) -> None:
        """Random weights of the published initialisation."""
        super().__init__()
        self.shape = shape
        inner, count = shape.inner_dim, shape.n_predict
        own = 1 if shape.tie_weights else count
        projections = min(count, 2) if shape.tie_weights else count
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab_size, inner) for _ in range(own))
        self.proj = nn.ModuleList(
            nn.Linear(shape.emb_dim if i == 0 else inner, inner, bias=False)
            for i in range(projections)
        )
        self.head = nn.ModuleList(
            nn.Linear(inner, shape.vocab_size, bias=False) for _ in range(own)
        )
        self.ln = nn.ModuleList(ScaledNorm(inner) for _ in range(own))
        for parameters in (self.emb, self.proj, self.head):
            for parameter in parameters.parameters():
                nn.init.normal_(parameter, 0.0, inner**-0.5)
        state_weight = 0.5 ** (0.5 / count)
        token_weight = ((1 - state_weight**2) * inner / 2) ** 0.5
        self.token_scale = token_weight / state_weight

    def start(self, hidden: Tensor) -> Tensor:
        """The first state, from the target's hidden state after its final norm [..., E]."""
        return normalised(hidden) * 0.5**0.5 if self.shape.scale_input else hidden

    def advance(self, stage: int, state: Tensor, tokens: Tensor) -> Tensor:
        """The state after the token that stands before what `stage` predicts, [..., D]."""
        own = 0 if self.shape.tie_weights else stage
        projected = self.proj[min(stage, len(self.proj) - 1)](state)
        mixed = torch.add(projected, self.emb[own](tokens), alpha=self.token_scale)
        return F.gelu(self.ln[own](mixed))

    def logits(self, stage: int, state: Tensor) -> Tensor:
        """[..., V]."""
        own = 0 if self.shape.tie_weights else stage
        logits: Tensor = self.head[own](state)
        return logits
