"""One decoder layer: attention and a gated MLP, each before its own RMS norm.

Dispatches as few operations as it can: on small models their number is what a step costs.
Knows neither checkpoints nor pages; the plan knows where a sequence's past lies.
"""

from dataclasses import dataclass

from torch import Tensor

from foretoken.ops.activation import silu_and_multiply
from foretoken.ops.attention import Plan
from foretoken.ops.linear import Linear
from foretoken.ops.norm import rms_norm
from foretoken.ops.rope import Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadNorm:
    """RMS norm of each head's query and key (Qwen3)."""

    query_d: Tensor
    key_d: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockWeights:
    """Tensors and linear layers of one block; heads of queries are in group-major order."""

    attention_norm_D: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    out: Linear
    mlp_norm_D: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """How a block's attention is divided."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """What all layers of one step share."""

    rotation: Rotation
    slots_T: Tensor
    first_slot: int | None
    """Set if the step's slots lie side by side."""
    plan: Plan


class Block:
    """x_TD -> x_TD, writing the keys and values of the step's tokens."""

    def __init__(self, weights: BlockWeights, heads: Heads) -> None:
        """Take over `weights`."""
        self._w = weights
        self._heads = heads

    def __call__(self, x_TD: Tensor, layer_kv: Tensor, step: StepView) -> Tensor:
        """The layer's output for the step's tokens."""
        w, eps = self._w, self._heads.eps
        mixed = self._attend(rms_norm(x_TD, w.attention_norm_D, eps), layer_kv, step)
        x_TD = w.out(mixed, x_TD)
        hidden = silu_and_multiply(w.gate_up(rms_norm(x_TD, w.mlp_norm_D, eps)))
        return w.down(hidden, x_TD)

    def _attend(self, y_TD: Tensor, layer_kv: Tensor, step: StepView) -> Tensor:
        h = self._heads
        heads_THd = self._w.qkv(y_TD).view(-1, h.num_heads + 2 * h.num_kv_heads, h.head_dim)
        q_THd = heads_THd[:, : h.num_heads]
        kv_THd = heads_THd[:, h.num_heads :]
        if self._w.head_norm is not None:
            q_THd.copy_(rms_norm(q_THd, self._w.head_norm.query_d, h.eps))
            k_THd = kv_THd[:, : h.num_kv_heads]
            k_THd.copy_(rms_norm(k_THd, self._w.head_norm.key_d, h.eps))
        step.rotation.apply_(heads_THd[:, : h.num_heads + h.num_kv_heads])
        kv = kv_THd.view(-1, 2, h.num_kv_heads, h.head_dim)
        if step.first_slot is None:
            layer_kv.index_copy_(0, step.slots_T, kv)
        else:
            layer_kv[step.first_slot : step.first_slot + kv.shape[0]] = kv
        return step.plan.attend(q_THd, layer_kv)
