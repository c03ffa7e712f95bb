"""Llama-like models (Touvron et al. 2023; grouped queries: Ainslie et al. 2023).

Reads Hugging Face's tensor names. Query, key and value weights become one matrix, gate and up
another; query heads, and with them the output projection's inputs, are put in group-major order
(see ops/attention/base.py), which is the same function with fewer copies.
"""

import torch
from torch import Tensor

from foretoken.layers.block import Block, BlockWeights, HeadNorm, Heads
from foretoken.models.base import Model, ModelParts
from foretoken.models.checkpoint_files import CheckpointFiles
from foretoken.ops.linear import Linear, LinearFactory
from foretoken.ops.rope import RotaryTable
from foretoken.shape import ModelShape


def build(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory) -> Model:
    """Assemble the model; raises CheckpointError for tensors that do not fit `shape`."""
    vocab, hidden = shape.vocab_size, shape.hidden_size
    embedding_VD = files.take("model.embed_tokens.weight", vocab, hidden)
    blocks = tuple(
        _block(files, shape, factory, f"model.layers.{i}.") for i in range(shape.num_hidden_layers)
    )
    if shape.tie_word_embeddings:
        files.ignore("lm_head.weight")
        head = factory.make(embedding_VD)
    else:
        head = factory.make(files.take("lm_head.weight", vocab, hidden))
    parts = ModelParts(
        embedding_VD=embedding_VD,
        blocks=blocks,
        norm_D=files.take("model.norm.weight", hidden),
        head=head,
        rotary=RotaryTable(
            shape.head_dim,
            shape.max_position_embeddings,
            shape.rope_theta,
            dtype=factory.dtype,
            device=factory.device,
        ),
    )
    return Model(shape, parts, dtype=factory.dtype, device=factory.device)


def _block(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory, at: str) -> Block:
    hidden = shape.hidden_size
    weights = BlockWeights(
        attention_norm_D=files.take(at + "input_layernorm.weight", hidden),
        qkv=_qkv(files, shape, factory, at + "self_attn."),
        head_norm=_head_norm(files, shape, at + "self_attn."),
        out=_out(files, shape, factory, at + "self_attn."),
        mlp_norm_D=files.take(at + "post_attention_layernorm.weight", hidden),
        gate_up=_gate_up(files, shape, factory, at + "mlp."),
        down=_down(files, shape, factory, at + "mlp."),
    )
    heads = Heads(
        num_heads=shape.num_attention_heads,
        num_kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        eps=shape.rms_norm_eps,
    )
    return Block(weights, heads)


def _qkv(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory, at: str) -> Linear:
    hidden, width = shape.hidden_size, shape.head_dim
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    sizes = {"q": heads * width, "k": kv_heads * width, "v": kv_heads * width}
    weights = {n: files.take(f"{at}{n}_proj.weight", s, hidden) for n, s in sizes.items()}
    weights["q"] = group_major(weights["q"], shape)
    bias_N = None
    if shape.attention_bias:
        biases = {n: files.take(f"{at}{n}_proj.bias", s) for n, s in sizes.items()}
        biases["q"] = group_major(biases["q"], shape)
        bias_N = torch.cat(list(biases.values()))
    return factory.make(torch.cat(list(weights.values())), bias_N)


def _out(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory, at: str) -> Linear:
    hidden, width = shape.hidden_size, shape.num_attention_heads * shape.head_dim
    weight_DH = files.take(at + "o_proj.weight", hidden, width)
    bias_D = files.take(at + "o_proj.bias", hidden) if shape.attention_bias else None
    return factory.make(group_major(weight_DH.T, shape).T.contiguous(), bias_D)


def _gate_up(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory, at: str) -> Linear:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    names = ("gate_proj", "up_proj")
    weights = [files.take(f"{at}{name}.weight", inner, hidden) for name in names]
    bias_N = None
    if shape.mlp_bias:
        bias_N = torch.cat([files.take(f"{at}{name}.bias", inner) for name in names])
    return factory.make(torch.cat(weights), bias_N)


def _down(files: CheckpointFiles, shape: ModelShape, factory: LinearFactory, at: str) -> Linear:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    bias_D = files.take(at + "down_proj.bias", hidden) if shape.mlp_bias else None
    return factory.make(files.take(at + "down_proj.weight", hidden, inner), bias_D)


def _head_norm(files: CheckpointFiles, shape: ModelShape, at: str) -> HeadNorm | None:
    if not shape.qk_norm:
        return None
    return HeadNorm(
        query_d=files.take(at + "q_norm.weight", shape.head_dim),
        key_d=files.take(at + "k_norm.weight", shape.head_dim),
    )


def group_major(rows: Tensor, shape: ModelShape) -> Tensor:
    """Reorder the first dimension, heads * head_dim, from kv-major to group-major heads."""
    kv_heads, group = shape.num_key_value_heads, shape.queries_per_kv
    split = rows.unflatten(0, (kv_heads, group, shape.head_dim))
    return split.transpose(0, 1).flatten(0, 2)
