"""What a loaded model is: embedding, layers, last norm, head. Model files build it."""

from dataclasses import dataclass
from typing import final

import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.features import FINAL, FeatureStore
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

    def hidden(
        self, inputs: ModelInput, store: KVStore, features: FeatureStore | None = None
    ) -> Tensor:
        """Run a step: hidden states after the last norm, [T, D] in the model's type.

        Args:
            inputs: the step's tokens and where they stand.
            store: keys and values; the step's are written to it.
            features: where the hidden states that a drafter reads are kept, if any.
        """
        windows = [SpanWindow(s.start, s.num_tokens, s.page_table) for s in inputs.spans]
        step = StepState(
            rotation=self.rotary.at(inputs.positions_T),
            slots_T=inputs.slots_T,
            attend=self.attention.plan(windows),
        )
        x_TD = F.embedding(inputs.tokens_T, self.embedding_VD)
        for index, (layer, layer_SKh) in enumerate(zip(self.layers, store.layers, strict=True)):
            if features is not None:
                features.write(index, inputs.slots_T, x_TD)
            x_TD = layer(x_TD, layer_SKh, step)
        x_TD = F.rms_norm(x_TD, self.norm_D.shape, self.norm_D, self.shape.rms_norm_eps)
        if features is not None:
            features.write(FINAL, inputs.slots_T, x_TD)
        return x_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        return self.head(hidden_RD).float()
