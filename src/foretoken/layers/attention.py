"""The attention block: fused QKV, rotary positions, one write to the KV store, paged attention."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from foretoken.kv.store import write
from foretoken.layers.rope import Rotation, rotate
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attend
from foretoken.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head (Qwen3)."""

    query_h: Tensor
    key_h: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What every layer of a step needs."""

    rotation: Rotation
    slots_T: Tensor | slice
    attend: Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBlock:
    """x [T, D] -> [T, D]; writes the step's keys and values first, so spans see themselves."""

    qkv: Linear
    out: Linear
    geometry: Geometry
    norms: HeadNorms | None = None

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor, layer_SKh: Tensor, step: StepState
    ) -> Tensor:
        """residual + attention(x), over the store `layer_SKh` of this layer."""
        heads, kv = self.geometry.num_heads, self.geometry.num_kv_heads
        qkv_TAh = self.qkv(x_TD).view(x_TD.shape[0], heads + 2 * kv, self.geometry.head_dim)
        turned = qkv_TAh[:, : heads + kv]
        if self.norms is not None:
            turned = self._normed(turned, self.norms)
        rotated = rotate(turned, step.rotation)
        qkv_TAh[:, heads : heads + kv] = rotated[:, heads:]
        write(layer_SKh, step.slots_T, qkv_TAh[:, heads:])
        return self.out(step.attend(rotated[:, :heads], layer_SKh), residual_TD)

    def _normed(self, qk_TAh: Tensor, norms: HeadNorms) -> Tensor:
        size, heads = (self.geometry.head_dim,), self.geometry.num_heads
        result = qk_TAh.clone()
        result[:, :heads] = F.rms_norm(qk_TAh[:, :heads], size, norms.query_h, norms.eps)
        result[:, heads:] = F.rms_norm(qk_TAh[:, heads:], size, norms.key_h, norms.eps)
        return result
