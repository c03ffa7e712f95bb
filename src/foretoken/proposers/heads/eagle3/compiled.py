"""EAGLE-3 networks on the compiled kernels: a pass is one call into C, and so is a whole chain.

Built from a network whose weights stay as they are. The network itself is the twin in PyTorch,
which trains and serves wherever some part has no kernel; a test compares them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kv.store import KVStore
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.models.compiled_layers import CompiledLayers, compile_layers
from foretoken.models.gpu.captured import CapturedSteps, capture
from foretoken.models.gpu.decoder import BesideParts, DecoderParts
from foretoken.models.rollout import CompiledRollout, MixedFeatures, RolloutParts, compile_rollout
from foretoken.models.tensors import ModelInput
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.attention.native import NativeAttention
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.ops.linear.gpu import GpuLinear
from foretoken.proposers.heads.eagle3.layers import Eagle3Layer
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.layer_builder import LayerBuilder
from foretoken.proposers.heads.paged_head import RunnerParts


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledEagle3:
    """A network bound to C; `compile_eagle3` makes it."""

    norm_features: Callable[[Tensor], Tensor]
    """What the network does to the target's features before it mixes them."""
    mixer: Linear
    layers: CompiledLayers | None
    """None: `rollout` runs them, a GPU's."""
    parts: RolloutParts | DecoderParts
    """What stands around the layers."""
    rollout: CompiledRollout | CapturedSteps

    def mix(self, features_TF: Tensor) -> Tensor:
        """The target's features, side by side, as the layers want them, [T, D]."""
        return self.mixer(self.norm_features(features_TF).contiguous())

    def forward(self, inputs: ModelInput, hidden_TD: Tensor, store: KVStore) -> Tensor:
        """One pass over slots, as the network's own: outputs [T, D] before the last norm."""
        if isinstance(self.rollout, CapturedSteps):
            tokens = inputs.tokens_T.tolist()
            return self.rollout.outputs(inputs.spans, tokens, hidden_TD, store)
        assert self.layers is not None, "made together"
        x_TD = hidden_TD.clone(memory_format=torch.contiguous_format)
        embedded_TD = self.parts.embedding(inputs.tokens_T)
        self.layers.run(x_TD, inputs, store, beside=embedded_TD)
        return x_TD

    def logits(self, outputs_BD: Tensor) -> Tensor:
        """float32 logits over the head's own ids, [B, N]."""
        return self.parts.head(self.parts.norm(outputs_BD.contiguous()))


def compile_eagle3(net: Eagle3, around: RunnerParts) -> CompiledEagle3 | None:
    """The network on kernels, or None if some part has none."""
    if net.shape.norm_output or net.shape.attention_bias:
        return None
    make, attention = around.linears, around.attention()
    if not isinstance(attention, NativeAttention | GpuAttention):
        return None  # No layer could be compiled: do not pack its matrices first.
    build = LayerBuilder(net.shape.layer, make)
    kind = LayerKind(attention, around.rotary)
    if isinstance(attention, GpuAttention):
        return _captured(net, around, build, kind)
    layers = compile_layers(
        [_layer(one, build, around.geometry) for one in net.decoder_layers], [kind]
    )
    if layers is None:
        return None
    mixer, mixed = make.of([net.fc]), None
    # Only a plain mixer can be part of the call into C.
    if isinstance(mixer, KernelLinear) and not net.norms_features:
        mixed = MixedFeatures(mixer, around.features)
    parts = RolloutParts(
        embedding=net.table,
        norm=build.norm(net.norm),
        head=make.of([net.lm_head], top=True),
        ids_N=net.target_ids.contiguous(),
        vocab_size=around.vocab_size,
        takes_beside=True,
        mixed=mixed,
    )
    rollout = compile_rollout(layers, parts)
    if rollout is None:
        return None
    return CompiledEagle3(
        norm_features=net.normed_features,
        mixer=mixer,
        layers=layers,
        parts=parts,
        rollout=rollout,
    )


def _captured(
    net: Eagle3, around: RunnerParts, build: LayerBuilder, kind: LayerKind
) -> CompiledEagle3 | None:
    """The network as a GPU's launches, or None if some part has none."""
    make, kernels = around.linears, backend_for(around.geometry.device).gpu
    mixer, head = make.of([net.fc]), make.of([net.lm_head], top=True)
    if kernels is None or not isinstance(mixer, GpuLinear) or not isinstance(head, GpuLinear):
        return None
    parts = DecoderParts(
        embedding=net.table,
        scale=1.0,
        layers=tuple(_layer(one, build, around.geometry) for one in net.decoder_layers),
        kinds=(kind,),
        norm=build.norm(net.norm),
        head=head,
        softcap=None,
        beside=BesideParts(
            mixer=None if net.norms_features else mixer,
            features=around.features,
            ids_N=net.target_ids.contiguous(),
            vocab_size=around.vocab_size,
        ),
    )
    rollout = capture(parts, kernels, kernels.recorder())
    if rollout is None:
        return None
    return CompiledEagle3(
        norm_features=net.normed_features, mixer=mixer, layers=None, parts=parts, rollout=rollout
    )


def _layer(module: Eagle3Layer, build: LayerBuilder, geometry: Geometry) -> Layer:
    first = module.hidden_norm is not None
    stream = module.hidden_norm if module.hidden_norm is not None else module.input_layernorm
    return Layer(
        kind=0,
        attention_norm=build.norm(stream),
        attention=build.attention(module.self_attn, geometry),
        mlp_norm=build.norm(module.post_attention_layernorm),
        mlp=build.mlp(module.mlp),
        beside_norm=build.norm(module.input_layernorm) if first else None,
        from_norm=first and module.residual_normed,
    )
