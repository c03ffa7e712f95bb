"""The parts that Llama-like checkpoints share, read under Hugging Face's names.

The shape says which parts a family has and model files how theirs are stored; this file knows how
they are fused.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.layers.attention import AttentionBlock, HeadNorms
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import RotaryTable
from foretoken.models.base import LoadOptions
from foretoken.models.compiled import compile_layers
from foretoken.models.decoder import Decoder
from foretoken.models.loader import Checkpoint
from foretoken.models.rollout import compile_rollout
from foretoken.models.weights import linear_of
from foretoken.ops.activation import ACTIVATIONS
from foretoken.ops.attention import Geometry, choose_attention
from foretoken.ops.linear import Linear, RowProbe
from foretoken.shape import ModelShape

_FUSED = {("q", "k", "v"): "qkv", ("gate", "up"): "gate_up"}


def group_major(rows: Tensor, shape: ModelShape) -> Tensor:
    """Reorder query heads in the first dimension as attention wants them (ops/attention/base)."""
    heads = (shape.num_key_value_heads, -1, shape.head_dim)
    reordered: Tensor = rows.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
    return reordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a family's tensors differ from Llama's on disk."""

    fused: bool = False
    """q, k, v are one matrix, and gate and up are (Phi-3)."""
    norm_offset: float = 0.0
    """What has to be added to the weights of norms (Gemma: 1)."""


class Part(NamedTuple):
    """One projection as stored."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One load: where tensors come from and how linears are made."""

    shape: ModelShape
    checkpoint: Checkpoint
    options: LoadOptions
    probe: RowProbe
    storage: Storage = Storage()

    def linear(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None = None,
        *,
        adds_residual: bool = False,
        wide: bool = False,
    ) -> Linear:
        """The weights, quantized or packed; as for `make_linear`. Only the head is `wide`."""
        return linear_of(
            weight_NK,
            self.options,
            probe=self.probe,
            bias_N=bias_N,
            adds_residual=adds_residual,
            wide=wide,
        )

    def norm(self, name: str, width: int) -> RMSNorm:
        """An RMS norm; with an offset its weights are kept in float32."""
        weight_D = self.checkpoint.take(f"{name}.weight", (width,))
        if self.storage.norm_offset:
            weight_D = weight_D.float() + self.storage.norm_offset
        return RMSNorm(weight_D, self.shape.rms_norm_eps)

    def parts(self, prefix: str, rows: dict[str, int], *, bias: bool) -> list[Part]:
        """Projections of the hidden state, name -> rows, from one stored matrix or several."""
        weights = self._stored(prefix, rows, "weight", (self.shape.hidden_size,))
        if not bias:
            return [Part(weight, None) for weight in weights]
        biases = self._stored(prefix, rows, "bias", ())
        return [Part(*pair) for pair in zip(weights, biases, strict=True)]

    def _stored(
        self, prefix: str, rows: dict[str, int], suffix: str, width: tuple[int, ...]
    ) -> list[Tensor]:
        take = self.checkpoint.take
        if not self.storage.fused:
            names = [(f"{prefix}.{name}_proj.{suffix}", count) for name, count in rows.items()]
            return [take(name, (count, *width)) for name, count in names]
        name = f"{prefix}.{_FUSED[tuple(rows)]}_proj.{suffix}"
        return list(take(name, (sum(rows.values()), *width)).split(list(rows.values())))

    def attention(self, prefix: str, layer: int) -> AttentionBlock:
        """q, k, v as one matrix, o, and per-head norms where the family has them."""
        shape = self.shape
        sizes = {"q": shape.query_size, "k": shape.kv_size, "v": shape.kv_size}
        q, k, v = self.parts(prefix, sizes, bias=shape.qkv_bias)
        weight_ND = torch.cat([group_major(q.weight, shape), k.weight, v.weight])
        bias_N = None
        if q.bias is not None and k.bias is not None and v.bias is not None:
            bias_N = torch.cat([group_major(q.bias, shape), k.bias, v.bias])
        norms = None
        if shape.head_norms:
            names = (f"{prefix}.q_norm", f"{prefix}.k_norm")
            norms = HeadNorms(*(self.norm(name, shape.head_dim) for name in names))
        out = self._down(f"{prefix}.o_proj", shape.query_size, bias=shape.out_bias)
        return AttentionBlock(
            qkv=self.linear(weight_ND, bias_N),
            out=self.linear(
                group_major(out.weight.T, shape).T.contiguous(),
                out.bias,
                adds_residual=not shape.sandwich_norms,
            ),
            geometry=self.geometry(self.shape.window(layer)),
            norms=norms,
        )

    def _down(self, name: str, width: int, *, bias: bool) -> Part:
        """A projection from `width` back to the hidden state."""
        hidden, take = self.shape.hidden_size, self.checkpoint.take
        weight = take(f"{name}.weight", (hidden, width))
        return Part(weight, take(f"{name}.bias", (hidden,)) if bias else None)

    def mlp(self, prefix: str) -> GatedMLP:
        """gate and up as one matrix, and down."""
        inner, bias = self.shape.intermediate_size, self.shape.mlp_bias
        gate, up = self.parts(prefix, {"gate": inner, "up": inner}, bias=bias)
        bias_N = None
        if gate.bias is not None and up.bias is not None:
            bias_N = torch.cat([gate.bias, up.bias])
        down = self._down(f"{prefix}.down_proj", inner, bias=bias)
        adds_residual = not self.shape.sandwich_norms
        return GatedMLP(
            gate_up=self.linear(torch.cat([gate.weight, up.weight]), bias_N),
            down=self.linear(down.weight, down.bias, adds_residual=adds_residual),
            activate=ACTIVATIONS[self.shape.hidden_act],
        )

    def layer(self, index: int, kind: int) -> Layer:
        """One decoder layer."""
        prefix, width = f"model.layers.{index}", self.shape.hidden_size
        before, between = f"{prefix}.input_layernorm", f"{prefix}.post_attention_layernorm"
        mlp_norm, after_attention, after_mlp = between, None, None
        if self.shape.sandwich_norms:
            mlp_norm = f"{prefix}.pre_feedforward_layernorm"
            after_attention = self.norm(between, width)
            after_mlp = self.norm(f"{prefix}.post_feedforward_layernorm", width)
        return Layer(
            kind=kind,
            attention_norm=self.norm(before, width),
            attention=self.attention(f"{prefix}.self_attn", index),
            mlp_norm=self.norm(mlp_norm, width),
            mlp=self.mlp(f"{prefix}.mlp"),
            after_attention=after_attention,
            after_mlp=after_mlp,
        )

    def geometry(self, window: int | None) -> Geometry:
        """Of the attention of layers with this window."""
        shape, options = self.shape, self.options
        return Geometry(
            num_heads=shape.num_attention_heads,
            num_kv_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            page_size=options.page_size,
            dtype=options.dtype,
            device=options.device,
            window=window,
            softcap=shape.attention_softcap,
            scale=shape.attention_scale,
        )

    def kind(self, window: int | None, like: Tensor) -> LayerKind:
        """The attention and positions of layers with this window."""
        shape, options = self.shape, self.options
        rope = shape.rope if window is None or shape.local_rope is None else shape.local_rope
        assert rope is not None, f"{shape.model_type} has rotary positions"
        attention = choose_attention(self.geometry(window), batch_invariant=options.batch_invariant)
        limit = shape.max_position_embeddings
        positions = min(options.max_model_len or limit, limit)
        return LayerKind(attention, RotaryTable(rope, max_positions=positions, like=like))

    def model(self) -> Decoder:
        """Embedding, layers, last norm and head; nothing may be left over.

        Raises:
            CheckpointError: tensors are missing, unused or misshapen.
        """
        shape, take = self.shape, self.checkpoint.take
        table = (shape.vocab_size, shape.hidden_size)
        embedding_VD = take("model.embed_tokens.weight", table)
        if shape.tie_word_embeddings:
            self.checkpoint.ignore("lm_head.weight")
            head_VD = embedding_VD
        else:
            head_VD = take("lm_head.weight", table)
        windows = [shape.window(layer) for layer in range(shape.num_hidden_layers)]
        different = list(dict.fromkeys(windows))
        layers = [self.layer(i, different.index(window)) for i, window in enumerate(windows)]
        norm = self.norm("model.norm", shape.hidden_size)
        self.checkpoint.finish()
        kinds = tuple(self.kind(window, embedding_VD) for window in different)
        scale = shape.embedding_scale
        head, compiled = self.linear(head_VD, wide=True), compile_layers(layers, kinds)
        rollout = compile_rollout(compiled, embedding_VD, norm, head) if scale == 1.0 else None
        return Decoder(
            shape=shape,
            embedding_VD=embedding_VD,
            embedding_scale=None if scale == 1.0 else embedding_VD.new_tensor(scale),
            kinds=kinds,
            layers=tuple(layers),
            norm=norm,
            head=head,
            compiled=compiled,
            rollout=rollout,
        )
