"""What a loaded model is: embedding, layers, last norm, head. Model files build it."""

from dataclasses import dataclass
from typing import final

import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.store import KVStore
from foretoken.layers.attention import AttentionBlock, StepState
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.rope import RotaryTable
from foretoken.models.tensors import ModelInput
from foretoken.ops.attention import Attention, Geometry, SpanWindow
from foretoken.ops.linear import Linear
from foretoken.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pre-norm decoder layer."""

    attention_norm_D: Tensor
    attention: AttentionBlock
    mlp_norm_D: Tensor
    mlp: GatedMLP
    eps: float

    def __call__(self, x_TD: Tensor, layer_SKh: Tensor, step: StepState) -> Tensor:
        """The residual stream after this layer."""
        size = self.attention_norm_D.shape
        normed = F.rms_norm(x_TD, size, self.attention_norm_D, self.eps)
        x_TD = self.attention(normed, x_TD, layer_SKh, step)
        return self.mlp(F.rms_norm(x_TD, size, self.mlp_norm_D, self.eps), x_TD)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A causal language model over paged keys and values."""

    shape: ModelShape
    geometry: Geometry
    embedding_VD: Tensor
    layers: tuple[Layer, ...]
    norm_D: Tensor
    head: Linear
    rotary: RotaryTable
    attention: Attention

    def hidden(self, inputs: ModelInput, store: KVStore) -> Tensor:
        """Run a step: hidden states after the last norm, [T, D] in the model's type."""
        windows = [SpanWindow(s.start, s.num_tokens, s.page_table) for s in inputs.spans]
        step = StepState(
            rotation=self.rotary.at(inputs.positions_T),
            slots_T=inputs.slots_T,
            attend=self.attention.plan(windows),
        )
        x_TD = F.embedding(inputs.tokens_T, self.embedding_VD)
        for layer, layer_SKh in zip(self.layers, store.layers, strict=True):
            x_TD = layer(x_TD, layer_SKh, step)
        return F.rms_norm(x_TD, self.norm_D.shape, self.norm_D, self.shape.rms_norm_eps)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        return self.head(hidden_RD).float()
