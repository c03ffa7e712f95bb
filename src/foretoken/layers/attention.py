"""The attention block: fused QKV, rotary positions, one write to the KV store, paged attention."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.kv.store import write
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import Rotation, rotate
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attend
from foretoken.ops.linear import Linear


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head (Qwen3, Gemma 3)."""

    query: RMSNorm
    key: RMSNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """What every layer of a kind needs in a step."""

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
        self, x_TD: Tensor, residual_TD: Tensor | None, layer_SKh: Tensor, step: StepState
    ) -> Tensor:
        """attention(x), plus the residual if there is one, over this layer's part of the store."""
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
        heads = self.geometry.num_heads
        result = qk_TAh.clone()
        result[:, :heads] = norms.query(qk_TAh[:, :heads])
        result[:, heads:] = norms.key(qk_TAh[:, heads:])
        return result
