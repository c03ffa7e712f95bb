"""One decoder layer, and what layers of a kind share."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.layers.attention import AttentionBlock, StepState
from foretoken.layers.mixture import Mixture
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.ops.attention import Attention


@dataclass(frozen=True, slots=True)
class Scaled:
    """What part of a layer gives times a number, added to the stream (Granite)."""

    factor: float

    def __call__(self, x_TD: Tensor, residual_TD: Tensor) -> Tensor:
        """residual + factor * x."""
        return residual_TD + x_TD * self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One decoder layer: norms before its parts, after them, or both; sums come after those."""

    kind: int
    """Which of the model's kinds of layers it is."""
    attention_norm: RMSNorm | None
    """None: attention reads the stream itself; so does the MLP below."""
    attention: AttentionBlock
    mlp_norm: RMSNorm | None
    mlp: GatedMLP | Mixture
    after_attention: RMSNorm | Scaled | None = None
    after_mlp: RMSNorm | Scaled | None = None
    beside_norm: RMSNorm | None = None
    """Norm of what the first layer of an EAGLE-3 head takes beside the stream. q, k and v are
    computed from both, side by side. Only compiled layers know it."""
    from_norm: bool = False
    """With `beside_norm`: whether the stream goes on from its own norm's output."""

    def __call__(self, x_TD: Tensor, layer_SKh: Tensor, step: StepState) -> Tensor:
        """The residual stream after this layer."""
        assert self.beside_norm is None, "only compiled layers take something beside the stream"
        normed = x_TD if self.attention_norm is None else self.attention_norm(x_TD)
        if self.after_attention is None:
            x_TD = self.attention(normed, x_TD, layer_SKh, step)
        else:
            out_TD = self.attention(normed, None, layer_SKh, step)
            x_TD = self.after_attention(out_TD, x_TD)
        normed = x_TD if self.mlp_norm is None else self.mlp_norm(x_TD)
        if self.after_mlp is None:
            return self.mlp(normed, x_TD)
        return self.after_mlp(self.mlp(normed, None), x_TD)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers with the same window and the same positions share."""

    attention: Attention
    rotary: RotaryTable
