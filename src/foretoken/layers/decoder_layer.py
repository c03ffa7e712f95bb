"""One decoder layer, and what layers of a kind share."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.layers.attention import AttentionBlock, StepState
from foretoken.layers.layer_inputs import LayerInput
from foretoken.layers.mixture import Mixture, MixtureBeside
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
    mlp: GatedMLP | Mixture | MixtureBeside
    after_attention: RMSNorm | Scaled | None = None
    after_mlp: RMSNorm | Scaled | None = None
    beside_norm: RMSNorm | None = None
    """Norm of what the first layer of an EAGLE-3 head takes beside the stream. q, k and v are
    computed from both, side by side. Only compiled layers know it."""
    from_norm: bool = False
    """With `beside_norm`: whether the stream goes on from its own norm's output."""

    input: LayerInput | None = None
    scale: Tensor | None = None
    """What the stream is multiplied by at last, one number."""

    def __call__(
        self,
        x_TD: Tensor,
        layer_SKh: Tensor,
        step: StepState,
        input_TP: Tensor | None = None,
    ) -> Tensor:
        """The residual stream after this layer; `input_TP`: what it gets beside that, if it has an
        `input`."""
        x_TD = self._attended_and_mixed(x_TD, layer_SKh, step)
        if self.input is not None:
            assert input_TP is not None, "the model makes what its layers get"
            x_TD = self.input(x_TD, input_TP)
        return x_TD if self.scale is None else x_TD * self.scale

    def _attended_and_mixed(self, x_TD: Tensor, layer_SKh: Tensor, step: StepState) -> Tensor:
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
