"""The sizes and the decoder layers of EAGLE-3 networks, with all published variants."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from foretoken.layers.rope import Rotation
from foretoken.proposers.heads.parts import Attend, HeadAttention, HeadMLP, HeadShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Shape:
    """Sizes and variants; names as in the `speculators` format."""

    layer: HeadShape
    """Sizes of the decoder layers; vocab_size is the target's."""
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
        super().__init__()
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.residual_normed = shape.norm_before_residual
        self.input_layernorm = nn.RMSNorm(size, eps)
        self.hidden_norm = nn.RMSNorm(size, eps) if first else None
        width = 2 * size if first else size
        self.self_attn = HeadAttention(shape.layer, width, bias=shape.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
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
