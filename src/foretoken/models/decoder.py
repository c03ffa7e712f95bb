"""Decoder: embedding, layers, last norm, head, in our own layers. Model files build it."""

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.library import follow_threads
from foretoken.kv.features import FINAL, FeatureStore
from foretoken.kv.store import KVStore
from foretoken.layers.attention import AttentionBlock, StepState
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.base import Model
from foretoken.models.tensors import ModelInput
from foretoken.ops.attention import Attention, SpanWindow
from foretoken.ops.linear import Linear
from foretoken.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One pre-norm decoder layer; with norms after its parts too, sums come after those."""

    kind: int
    """Which of the model's kinds of layers it is."""
    attention_norm: RMSNorm
    attention: AttentionBlock
    mlp_norm: RMSNorm
    mlp: GatedMLP
    after_attention: RMSNorm | None = None
    after_mlp: RMSNorm | None = None

    def __call__(self, x_TD: Tensor, layer_SKh: Tensor, step: StepState) -> Tensor:
        """The residual stream after this layer."""
        normed = self.attention_norm(x_TD)
        if self.after_attention is None:
            x_TD = self.attention(normed, x_TD, layer_SKh, step)
        else:
            out_TD = self.attention(normed, None, layer_SKh, step)
            x_TD = self.after_attention(out_TD, x_TD)
        normed = self.mlp_norm(x_TD)
        if self.after_mlp is None:
            return self.mlp(normed, x_TD)
        return self.after_mlp(self.mlp(normed, None), x_TD)


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What layers with the same window and the same positions share."""

    attention: Attention
    rotary: RotaryTable


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder(Model):
    """A causal language model in our own layers."""

    shape: ModelShape
    embedding_VD: Tensor
    embedding_scale: Tensor | None
    """One number in the model's type; None: 1."""
    kinds: tuple[LayerKind, ...]
    layers: tuple[Layer, ...]
    norm: RMSNorm
    head: Linear

    def hidden(
        self, inputs: ModelInput, store: KVStore, features: FeatureStore | None = None
    ) -> Tensor:
        """Run a step; see `Model`."""
        follow_threads(torch.get_num_threads())
        spans = [SpanWindow(s.start, s.num_tokens, s.page_table, s.paths) for s in inputs.spans]
        steps = [
            StepState(
                rotation=kind.rotary.at(inputs.positions_T),
                slots_T=inputs.slots_T,
                attend=kind.attention.plan(spans),
            )
            for kind in self.kinds
        ]
        x_TD = F.embedding(inputs.tokens_T, self.embedding_VD)
        if self.embedding_scale is not None:
            x_TD *= self.embedding_scale
        for index, (layer, layer_SKh) in enumerate(zip(self.layers, store.layers, strict=True)):
            if features is not None:
                features.write(index, inputs.slots_T, x_TD)
            x_TD = layer(x_TD, layer_SKh, steps[layer.kind])
        x_TD = self.norm(x_TD)
        if features is not None:
            features.write(FINAL, inputs.slots_T, x_TD)
        return x_TD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """float32 logits [R, V]."""
        logits_RV = self.head(hidden_RD).float()
        cap = self.shape.logit_softcap
        return logits_RV if cap is None else logits_RV.div_(cap).tanh_().mul_(cap)
