"""The dense Llama that training runs: whole sequences, causal, no cache pages.

Owns the training-time architecture and its parameter layout (fused QKV and gate/up).
It does not know about serving: `foretoken.training.llama_folder` splits the fused matrices into
Hugging Face's Llama names. Invariant: with equal weights its logits equal LlamaForCausalLM's.
"""

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.config.reader import at_least, check_fields, require
from foretoken.training.losses import head_loss

QUERY_BLOCK = 128
LONGEST_BLOCKED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; the embedding is tied to the output head."""

    vocab_size: Annotated[int, at_least(1)] = 8000
    """Tokens of the vocabulary; a draft has its target's."""
    hidden_size: Annotated[int, at_least(1)] = 192
    """Width of the residual stream."""
    layers: Annotated[int, at_least(1)] = 24
    """Decoder layers."""
    heads: Annotated[int, at_least(1)] = 6
    """Attention heads, which divide the width."""
    kv_heads: Annotated[int, at_least(1)] = 2
    """Heads of keys and values, which divide the heads."""
    ffn_size: Annotated[int, at_least(1)] = 512
    """Inner width of the gated MLP."""
    max_positions: Annotated[int, at_least(1)] = 2048
    """Longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that no model has."""
        check_fields(self, "shape.")
        even = self.hidden_size % (2 * self.heads) == 0
        allowed = f"a divisor of half of shape.hidden_size {self.hidden_size}"
        require("shape.heads", self.heads, even, allowed)
        shared = self.heads % self.kv_heads == 0
        allowed = f"a divisor of shape.heads {self.heads}"
        require("shape.kv_heads", self.kv_heads, shared, allowed)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.heads

    @property
    def kv_size(self) -> int:
        """Channels of all the key (or value) heads together."""
        return self.kv_heads * self.head_dim

    def as_dict(self) -> dict[str, Any]:
        """The fields as a plain dictionary, for checkpoints."""
        return asdict(self)


class Rope(NamedTuple):
    """Cosine and sine tables, [T, head_dim], float32."""

    cos: Tensor
    sin: Tensor


class KeyValue(NamedTuple):
    """One layer's keys and values, each [B, kv_heads, T, head_dim]."""

    key: Tensor
    value: Tensor


class QueryKeyValue(NamedTuple):
    """Queries [B, heads, T, head_dim], keys and values [B, kv_heads, T, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor


class BlockOutput(NamedTuple):
    """A block's hidden states [B, T, D] and the keys and values it computed."""

    hidden: Tensor
    cache: KeyValue


class LlamaOutput(NamedTuple):
    """Final hidden states [B, T, D], normed, and one cache a layer."""

    hidden: Tensor
    caches: list[KeyValue]


def rope_tables(shape: LlamaShape, length: int) -> Rope:
    """Rotary tables for positions 0..length-1 (RoFormer, Su et al. 2021; half-split form)."""
    dim = shape.head_dim
    inverse = 1.0 / shape.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return Rope(angles.cos(), angles.sin())


def rotate(x_BHTd: Tensor, rope: Rope) -> Tensor:
    """Apply the rotary position embedding to [B, H, T, head_dim], in x's dtype."""
    half = x_BHTd.shape[-1] // 2
    turned = torch.cat((-x_BHTd[..., half:], x_BHTd[..., :half]), dim=-1)
    return (x_BHTd * rope.cos + turned * rope.sin).to(x_BHTd.dtype)


def blocked_attention(query_NTd: Tensor, key_NTd: Tensor, value_NTd: Tensor) -> Tensor:
    """Causal attention on [B * H, T, head_dim] with explicit scores, a block of queries a time."""
    length, dim = query_NTd.shape[1:]
    query_NTd = query_NTd * dim**-0.5
    outputs = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        scores = torch.bmm(query_NTd[:, start:end], key_NTd[:, :end].transpose(1, 2)).float()
        seen = torch.ones(end - start, end, dtype=torch.bool, device=scores.device).tril(start)
        weights = torch.softmax(scores.masked_fill(~seen, -1e30), dim=-1)
        outputs.append(torch.bmm(weights.to(value_NTd.dtype), value_NTd[:, :end]))
    return torch.cat(outputs, dim=1)


def causal_attention(query_BHTd: Tensor, key_BHTd: Tensor, value_BHTd: Tensor) -> Tensor:
    """Causal attention, [B, H, T, head_dim] each; the fastest known form for the length."""
    length, on_cpu = query_BHTd.shape[2], query_BHTd.device.type == "cpu"
    if not on_cpu or length > LONGEST_BLOCKED or not torch.compiler.is_compiling():
        return F.scaled_dot_product_attention(query_BHTd, key_BHTd, value_BHTd, is_causal=True)
    flat = (x.flatten(0, 1) for x in (query_BHTd, key_BHTd, value_BHTd))
    return blocked_attention(*flat).view(query_BHTd.shape)


class Block(nn.Module):
    """One pre-norm transformer layer: grouped-query attention and SwiGLU."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        hidden, kv = shape.hidden_size, shape.kv_size
        self.attn_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.qkv = nn.Linear(hidden, hidden + 2 * kv, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(hidden, eps=shape.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * shape.ffn_size, bias=False)
        self.down = nn.Linear(shape.ffn_size, hidden, bias=False)

    def forward(self, x_BTD: Tensor, rope: Rope) -> BlockOutput:
        """Run the layer on whole sequences [B, T, D] from position 0."""
        qkv = self.project(x_BTD, rope)
        group = self.shape.heads // self.shape.kv_heads
        mixed = causal_attention(
            qkv.query,
            qkv.key.repeat_interleave(group, dim=1),
            qkv.value.repeat_interleave(group, dim=1),
        )
        return BlockOutput(self.finish(x_BTD, mixed), KeyValue(qkv.key, qkv.value))

    def project(self, x_BTD: Tensor, rope: Rope) -> QueryKeyValue:
        """The rotated queries and keys, and the values, of [B, T, D]."""
        shape = self.shape
        batch, length, _ = x_BTD.shape
        qkv = self.qkv(self.attn_norm(x_BTD)).view(batch, length, -1, shape.head_dim)
        wide = qkv.transpose(1, 2)
        turned = rotate(wide[:, : -shape.kv_heads], rope)
        query, key = turned[:, : shape.heads], turned[:, shape.heads :]
        return QueryKeyValue(query, key, wide[:, -shape.kv_heads :])

    def finish(self, x_BTD: Tensor, mixed_BHTd: Tensor) -> Tensor:
        """Everything after attention, which gave [B, H, T, head_dim]."""
        batch, length, _ = x_BTD.shape
        x_BTD = x_BTD + self.out(mixed_BHTd.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate_up(self.ffn_norm(x_BTD)).chunk(2, dim=-1)
        hidden: Tensor = x_BTD + self.down(F.silu(gate) * up)
        return hidden


class Llama(nn.Module):
    """A Llama decoder with tied embeddings; see `LlamaShape` for the sizes."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        rope = rope_tables(shape, shape.max_positions)
        self.register_buffer("rope_cos", rope.cos, persistent=False)
        self.register_buffer("rope_sin", rope.sin, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        residual = 0.5 / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            gain = residual if name.endswith(("out.weight", "down.weight")) else 1.0
            std = 0.02 if name == "embed.weight" else gain / math.sqrt(parameter.shape[1])
            nn.init.normal_(parameter, std=std)

    def rope(self, start: int, length: int) -> Rope:
        """The rotary tables of positions start..start+length-1."""
        end = start + length
        assert end <= self.shape.max_positions, (end, self.shape.max_positions)
        return Rope(self.get_buffer("rope_cos")[start:end], self.get_buffer("rope_sin")[start:end])

    def forward(self, tokens_BT: Tensor) -> LlamaOutput:
        """Hidden states [B, T, D] after the final norm, for int64 tokens [B, T] from position 0."""
        rope = self.rope(0, tokens_BT.shape[1])
        hidden, caches = self.embed(tokens_BT), []
        for block in self.blocks:
            hidden, cache = block(hidden, rope)
            caches.append(cache)
        return LlamaOutput(self.norm(hidden), caches)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary logits [..., V] of normed hidden states [..., D]."""
        return F.linear(hidden, self.embed.weight)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean cross entropy in nats of int64 targets [B, T]; targets below 0 do not count."""
        hidden = self.forward(tokens_BT).hidden
        return head_loss(hidden.flatten(0, 1), self.embed.weight, targets_BT.flatten())
