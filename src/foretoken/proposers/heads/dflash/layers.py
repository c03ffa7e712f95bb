"""The sizes and the decoder layers of block heads (DFlash, DSpark).

A layer is Qwen3's, with one difference: the rows of a block attend to keys and values that the same
layer makes of the target's features, and to those of the block. How they are kept is the business
of the `Attend` that a layer is called with.
"""

from dataclasses import dataclass

from torch import Tensor, nn

from foretoken.layers.rope import Rotation, rotate
from foretoken.proposers.heads.parts import Attend, HeadMLP, HeadNorm, HeadShape
from foretoken.shape import RopeShape


@dataclass(frozen=True, slots=True)
class BlockView:
    """What the rows of a block see in a layer."""

    window: int | None = None
    """Only keys at a distance below this; None: all."""
    causal: bool = False
    """Whether a row sees no later row of its block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes and variants of a block head."""

    layer: HeadShape
    """Sizes of the decoder layers; vocab_size is the target's."""
    rope: RopeShape
    views: tuple[BlockView, ...]
    """One a layer."""
    block_size: int
    """Rows of a block as it was trained: the newest token and the masks behind it."""
    first_row: int
    """The row that predicts the first draft: 1, row 0 predicts nothing; or 0, each row predicts the
    token after its own."""
    mask_token_id: int
    target_hidden_size: int
    target_layers: int
    points: tuple[int, ...]
    """Target layers whose inputs are joined, in this order."""
    draft_vocab_size: int
    own_embedding: bool = False
    own_head: bool = False
    """Whether it brings its own output head; else the target's makes its logits."""
    attention_bias: bool = False
    embedding_scale: float = 1.0
    """What rows of the embedding table are multiplied with."""
    output_multiplier: float = 1.0
    """What is multiplied with the outputs before they become logits."""
    logit_softcap: float | None = None
    """Of its own head: logits become c * tanh(logits / c)."""

    @property
    def max_drafts(self) -> int:
        """Drafts of a whole block."""
        return self.block_size - self.first_row


class BlockAttention(nn.Module):
    """Grouped-query attention with norms over query and key heads, as in Qwen3."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        layer, bias = shape.layer, shape.attention_bias
        self.heads, self.kv_heads = layer.num_attention_heads, layer.num_key_value_heads
        queries, keys = self.heads * layer.head_dim, self.kv_heads * layer.head_dim
        self.q_proj = nn.Linear(layer.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(layer.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(layer.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, layer.hidden_size, bias=bias)
        self.q_norm = HeadNorm(layer.head_dim, layer.rms_norm_eps)
        self.k_norm = HeadNorm(layer.head_dim, layer.rms_norm_eps)

    def keys_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Keys and values [..., K, h] of a block's normed rows, or of the target's context."""
        k = self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, -1)))
        v: Tensor = self.v_proj(x).unflatten(-1, (self.kv_heads, -1))
        return rotate(k, rotation), v

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """Normed rows [..., D] -> [..., D]."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, -1)))
        out: Tensor = self.o_proj(attend(rotate(q, rotation), *self.keys_values(x, rotation)))
        return out


class BlockLayer(nn.Module):
    """A pre-norm decoder layer of a block's rows."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        size, eps = shape.layer.hidden_size, shape.layer.rms_norm_eps
        self.input_layernorm = HeadNorm(size, eps)
        self.self_attn = BlockAttention(shape)
        self.post_attention_layernorm = HeadNorm(size, eps)
        self.mlp = HeadMLP(shape.layer)

    def forward(self, x: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        """The residual stream after the layer, [..., D]."""
        x = x + self.self_attn(self.input_layernorm(x), rotation, attend)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
