"""The parts that Llama-like checkpoints share, read under Hugging Face's names.

Model files say which parts a family has; this file knows how each is stored and fused.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.layers.attention import AttentionBlock, HeadNorms
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.rope import RotaryTable
from foretoken.models.base import Layer, Model
from foretoken.models.loader import Checkpoint
from foretoken.ops.attention import Geometry, choose_attention
from foretoken.ops.linear import Linear, RowProbe, make_linear
from foretoken.shape import ModelShape


def group_major(rows_NK: Tensor, shape: ModelShape) -> Tensor:
    """Reorder query heads in the first dimension as attention wants them (ops/attention/base)."""
    heads = (shape.num_key_value_heads, -1, shape.head_dim)
    reordered: Tensor = rows_NK.unflatten(0, heads).transpose(0, 1).flatten(0, 2)
    return reordered


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """One load: where tensors come from and how linears are made."""

    shape: ModelShape
    checkpoint: Checkpoint
    geometry: Geometry
    batch_invariant: bool
    probe: RowProbe

    def linear(self, weight_NK: Tensor, *, adds_residual: bool = False) -> Linear:
        """The weights, packed if that is faster; says whether it will be given a residual."""
        probe = self.probe if self.batch_invariant else None
        return make_linear(weight_NK, probe=probe, adds_residual=adds_residual)

    def attention(self, prefix: str, *, head_norms: bool) -> AttentionBlock:
        """q, k, v as one matrix, o, and per-head norms where the family has them."""
        shape, take = self.shape, self.checkpoint.take
        hidden, queries, keys = shape.hidden_size, shape.query_size, shape.kv_size
        names = [f"{prefix}.{name}_proj.weight" for name in ("q", "k", "v")]
        sizes = [(queries, hidden), (keys, hidden), (keys, hidden)]
        norms = None
        if head_norms:
            size = (shape.head_dim,)
            query_h = take(f"{prefix}.q_norm.weight", size)
            key_h = take(f"{prefix}.k_norm.weight", size)
            norms = HeadNorms(query_h, key_h, shape.rms_norm_eps)
        q_ND, k_ND, v_ND = (take(name, size) for name, size in zip(names, sizes, strict=True))
        out_DN = take(f"{prefix}.o_proj.weight", (hidden, queries))
        return AttentionBlock(
            qkv=self.linear(torch.cat([group_major(q_ND, shape), k_ND, v_ND])),
            out=self.linear(group_major(out_DN.T, shape).T.contiguous(), adds_residual=True),
            geometry=self.geometry,
            norms=norms,
        )

    def mlp(self, prefix: str) -> GatedMLP:
        """gate and up as one matrix, and down."""
        hidden, inner = self.shape.hidden_size, self.shape.intermediate_size
        names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
        gate_up = self.checkpoint.take_rows(names, [(inner, hidden)] * 2)
        down = self.checkpoint.take(f"{prefix}.down_proj.weight", (hidden, inner))
        return GatedMLP(
            gate_up=self.linear(gate_up),
            down=self.linear(down, adds_residual=True),
            width=inner,
        )

    def layer(self, index: int, *, head_norms: bool) -> Layer:
        """One decoder layer."""
        prefix, size = f"model.layers.{index}", (self.shape.hidden_size,)
        take = self.checkpoint.take
        return Layer(
            attention_norm_D=take(f"{prefix}.input_layernorm.weight", size),
            attention=self.attention(f"{prefix}.self_attn", head_norms=head_norms),
            mlp_norm_D=take(f"{prefix}.post_attention_layernorm.weight", size),
            mlp=self.mlp(f"{prefix}.mlp"),
            eps=self.shape.rms_norm_eps,
        )

    def model(self, *, head_norms: bool) -> Model:
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
        layers = [self.layer(i, head_norms=head_norms) for i in range(shape.num_hidden_layers)]
        norm_D = take("model.norm.weight", (shape.hidden_size,))
        self.checkpoint.finish()
        return Model(
            shape=shape,
            geometry=self.geometry,
            embedding_VD=embedding_VD,
            layers=tuple(layers),
            norm_D=norm_D,
            head=self.linear(head_VD),
            rotary=RotaryTable(
                head_dim=shape.head_dim,
                theta=shape.rope_theta,
                max_positions=shape.max_position_embeddings,
                like=embedding_VD,
            ),
            attention=choose_attention(self.geometry, batch_invariant=self.batch_invariant),
        )
