"""What head networks are made of: norms, attention over a given function, the gated MLP.

Linear maps are `nn.Linear` in the order of heads of the published checkpoints; how keys and values
are kept is the business of the `Attend` that a layer is called with.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foretoken.errors import NotYetError
from foretoken.layers.rope import Rotation, rotate
from foretoken.proposers.heads.base import TargetFacts
from foretoken.shape.fields import size

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [..., H, h], k [..., K, h], v [..., K, h]), rotated -> [..., H * h]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head's decoder layers; names as in Hugging Face configs."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float


def read_layer_shape(config: Mapping[str, Any], target: TargetFacts, layers: int) -> HeadShape:
    """The decoder layers of an EAGLE head, from its (nested) Llama config."""
    hidden, heads = size(config, "hidden_size"), size(config, "num_attention_heads")
    positions = size(config, "max_position_embeddings", target.max_position_embeddings)
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    if scaling.get("rope_type", scaling.get("type", "default")) != "default":
        raise NotYetError("config.json rope_scaling", scaling, "default")
    return HeadShape(
        vocab_size=size(config, "vocab_size", target.vocab_size),
        hidden_size=hidden,
        intermediate_size=size(config, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=size(config, "num_key_value_heads", heads),
        head_dim=size(config, "head_dim", hidden // heads),
        max_position_embeddings=positions,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
    )


def group_major(rows: Tensor, shape: HeadShape) -> Tensor:
    """Query heads, each with any number of rows, in the order that attention wants
    (ops/attention/base)."""
    keys = shape.num_key_value_heads
    heads = rows.unflatten(0, (keys, shape.num_attention_heads // keys, -1))
    reordered: Tensor = heads.transpose(0, 1).flatten(0, 2)
    return reordered


def num_layers(names: Iterable[str]) -> int:
    """How many decoder layers the file holds, whatever its config says."""
    found = {int(m.group(1)) for m in (re.match(r"layers\.(\d+)\.", n) for n in names) if m}
    return len(found) or 1


class HeadAttention(nn.Module):
    """Grouped-query attention whose input may be wider than its output."""

    def __init__(
        self, shape: HeadShape, input_size: int, *, bias: bool = False, norms: bool = False
    ) -> None:
        """Project `input_size` values.

        Args:
            shape: sizes of the layer.
            input_size: values of a row.
            bias: of q, k and v; with `norms` of the output, too.
            norms: over query and key heads, as in Qwen3.
        """
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        queries, keys = self.heads * shape.head_dim, self.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=bias)
        self.k_proj = nn.Linear(input_size, keys, bias=bias)
        self.v_proj = nn.Linear(input_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=bias and norms)
        size, eps = shape.head_dim, shape.rms_norm_eps
        self.q_norm = nn.RMSNorm(size, eps) if norms else nn.Identity()
        self.k_norm = nn.RMSNorm(size, eps) if norms else nn.Identity()

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, h] of [..., input_size]."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        v: Tensor = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        return rotate(k, rotation), v

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """[..., input_size] -> [..., hidden_size]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1)))
        out: Tensor = self.o_proj(attend(rotate(q, rotation), *self.keys_values(x, rotation)))
        return out


class HeadMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden_size] -> the same."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class HeadLayer(nn.Module):
    """A pre-norm decoder layer."""

    def __init__(
        self, shape: HeadShape, *, bias: bool, norms: bool = False, normed: bool = True
    ) -> None:
        """As `HeadAttention`; without the norm before attention if not `normed`."""
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(size, eps) if normed else nn.Identity()
        self.self_attn = HeadAttention(shape, size, bias=bias, norms=norms)
        self.post_attention_layernorm = nn.RMSNorm(size, eps)
        self.mlp = HeadMLP(shape)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream after the layer, [..., D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
