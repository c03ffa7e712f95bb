"""EAGLE-3: a decoder layer over features of several target layers, with a vocabulary of its own.

Slot i joins the embedding of token i + 1 with g_i = fc(features of three layers at i), or with its
own previous output where the target's features are not known yet. The layer's output, before the
last norm, is recycled; after it, `lm_head` gives logits over the reduced vocabulary. `d2t` holds
offsets: draft id j stands for target id j + d2t[j].

Source: Li et al. 2025 (arXiv 2503.01840), the published EAGLE-3 checkpoints, and the variants of
the `speculators` format: norm_before_residual, norm_before_fc, fc_norm, norm_output. P-EAGLE
(arXiv 2602.01469) is the same network with `mask_hidden` for slots whose features do not exist;
`anchored` is a variant of our own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.parts import Attend, HeadAttention, HeadMLP, HeadShape, RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """Sizes and variants; names as in the `speculators` format."""

    layer: HeadShape
    """Of the decoder layers; its vocab_size is the target's."""
    draft_vocab_size: int
    target_hidden_size: int
    num_features: int = 3
    """Target layers whose hidden states are joined."""
    norm_before_residual: bool = False
    """Whether the residual stream starts after hidden_norm instead of before it."""
    norm_before_fc: bool = False
    """One norm over all features before fc."""
    fc_norm: bool = False
    """One norm per feature before fc."""
    norm_output: bool = False
    """Whether the output is recycled after the last norm."""
    own_embedding: bool = False
    """Whether the head brings its own token embedding."""
    parallel: bool = False
    """P-EAGLE: whether it has `mask_hidden`."""
    anchored: bool = False
    """Our variant of P-EAGLE: a mask slot repeats the newest token and adds its mask to the newest
    features, in place of a mask token and the mask alone."""
    mask_depths: int = 1
    """Masks in `mask_hidden`, for the first mask slot, the second ...; the last one repeats."""
    attention_bias: bool = False


class Eagle3Layer(nn.Module):
    """The first layer takes embedding and features side by side; others are ordinary."""

    def __init__(self, shape: Eagle3Shape, *, first: bool) -> None:
        """Sizes from `shape`."""
        super().__init__()
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.residual_normed = shape.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        width = 2 * size if first else size
        self.self_attn = HeadAttention(shape.layer, width, bias=shape.attention_bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = HeadMLP(shape.layer)

    def forward(self, x: Tensor, embedded: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream after the layer."""
        if self.hidden_norm is None:
            joined = self.input_layernorm(x)
        else:
            normed = self.hidden_norm(x)
            joined = torch.cat((self.input_layernorm(embedded), normed), dim=-1)
            x = normed if self.residual_normed else x
        x = x + self.self_attn(joined, rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Eagle3(nn.Module):
    """The network; parameters have the names of the `speculators` format."""

    def __init__(self, shape: Eagle3Shape) -> None:
        """Random weights; the reduced vocabulary starts as the first ids."""
        super().__init__()
        self.shape = shape
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        wide, count = shape.target_hidden_size, shape.num_features
        self.input_norm = RMSNorm(count * wide, eps) if shape.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(wide, eps) for _ in range(count)) if shape.fc_norm else None
        )
        self.fc = nn.Linear(count * wide, size, bias=False)
        self.layers = nn.ModuleList(
            Eagle3Layer(shape, first=i == 0) for i in range(shape.layer.num_hidden_layers)
        )
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, shape.draft_vocab_size, bias=False)
        self.d2t: Tensor
        self.embedding_VD: Tensor
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab_size, dtype=torch.int64))
        if shape.parallel:
            self.mask_hidden = nn.Parameter(torch.zeros(1, shape.mask_depths, count * wide))
        if shape.own_embedding:
            self.embed_tokens = nn.Embedding(shape.layer.vocab_size, size)
        else:
            self.register_buffer("embedding_VD", torch.empty(0, device="cpu"), persistent=False)

    def use_embedding(self, embedding_VD: Tensor) -> None:
        """Embed tokens with the target's table, shared and not trained, unless it has its own."""
        if not self.shape.own_embedding:
            self.embedding_VD = embedding_VD

    def drop_matrices(self) -> None:
        """Free all linear maps: from now on something else runs them. Norms, tables, masks and ids
        stay."""
        del self.layers, self.fc, self.lm_head

    @property
    def target_ids(self) -> Tensor:
        """The target's id of each draft id, int64 [Vd], ascending."""
        ids: Tensor = self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)
        return ids

    def mix(self, features: Tensor) -> Tensor:
        """Features of the target's layers, side by side [..., F] -> [..., D]."""
        mixed: Tensor = self.fc(self.normed_features(features))
        return mixed

    @property
    def norms_features(self) -> bool:
        """Whether `normed_features` does anything."""
        return self.input_norm is not None or self.fc_norm is not None

    def mask_features(self, count: int) -> Tensor:
        """What stands for the features of the first `count` mask slots, [count, F]."""
        last = self.shape.mask_depths - 1
        return self.mask_hidden[0, [min(i, last) for i in range(count)]]

    def masks(self, count: int) -> Tensor:
        """The same, mixed: [count, D]."""
        return self.mix(self.mask_features(count))

    def normed_features(self, features: Tensor) -> Tensor:
        """Features as `fc` wants them, [..., F]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), dim=-1)
            normed = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
            features = torch.cat(normed, dim=-1)
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        """One pass over slots.

        Args:
            tokens: of the slot after each feature's, int64 [...].
            hidden: `mix` of the target's features or its own recycled output, [..., D].
            rotation: of the slots' positions.
            attends: one per layer.

        Returns:
            [..., D]: to be recycled, and to be given to `logits`.
        """
        own = self.shape.own_embedding
        table = self.embed_tokens.weight if own else self.embedding_VD
        embedded = nn.functional.embedding(tokens, table)
        x = hidden
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, embedded, rotation, attend)
        return self.norm(x) if self.shape.norm_output else x

    def logits(self, output: Tensor) -> Tensor:
        """Logits over the reduced vocabulary, [..., Vd], from what `forward` returned."""
        normed = output if self.shape.norm_output else self.norm(output)
        logits: Tensor = self.lm_head(normed)
        return logits
