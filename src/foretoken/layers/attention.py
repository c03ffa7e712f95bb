"""The attention block: fused QKV, rotary positions, one write to the KV store, paged attention."""

from dataclasses import dataclass

from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kv.store import write
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import Rotation, rotate
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attend
from foretoken.ops.linear import Linear
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.ops.row_operations import Turn


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head (Qwen3, Gemma 3), or over all of them."""

    query: RMSNorm
    key: RMSNorm
    whole: bool = False
    """Whether a norm reaches over all query heads, and one over all key heads (OLMo 2)."""


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
        qkv_TA = self.qkv(x_TD)
        if self.norms is not None and self.norms.whole:
            self._norm_whole(qkv_TA, self.norms)
        qkv_TAh = qkv_TA.view(x_TD.shape[0], heads + 2 * kv, self.geometry.head_dim)
        kernels = backend_for(qkv_TA.device).rows(qkv_TA)
        if kernels is not None:
            kernels.turn_and_write(qkv_TA, layer_SKh, self.turn(step))
            if step.rotation.query_scale is not None:
                qkv_TAh[:, :heads] *= step.rotation.query_scale
            return self.out(step.attend(qkv_TAh[:, :heads], layer_SKh), residual_TD)
        turned = qkv_TAh[:, : heads + kv]
        if self.norms is not None and not self.norms.whole:
            turned = self._normed(turned, self.norms)
        rotated = rotate(turned, step.rotation)
        if step.rotation.query_scale is not None:
            rotated[:, :heads] *= step.rotation.query_scale
        qkv_TAh[:, heads : heads + kv] = rotated[:, heads:]
        write(layer_SKh, step.slots_T, quantize_kv(qkv_TAh[:, heads:], layer_SKh.dtype))
        return self.out(step.attend(rotated[:, :heads], layer_SKh), residual_TD)

    def turn(self, step: StepState) -> Turn:
        """The step's rotation and slots as the compiled kernel takes them."""
        norms = None
        if self.norms is not None and not self.norms.whole:
            query, key = self.norms.query, self.norms.key
            norms = query.weight_D, key.weight_D, query.eps
        return Turn(
            num_heads=self.geometry.num_heads,
            num_kv_heads=self.geometry.num_kv_heads,
            cos_TW=step.rotation.cos,
            sin_TW=step.rotation.sin,
            slots_T=step.slots_T,
            norms=norms,
        )

    def _norm_whole(self, qkv_TA: Tensor, norms: HeadNorms) -> None:
        """Norm queries and keys where they lie, each over all heads."""
        size = self.geometry.head_dim
        queries, keys = self.geometry.num_heads * size, self.geometry.num_kv_heads * size
        for norm, x in (
            (norms.query, qkv_TA[:, :queries]),
            (norms.key, qkv_TA[:, queries : queries + keys]),
        ):
            x.copy_(norm(x))

    def _normed(self, qk_TAh: Tensor, norms: HeadNorms) -> Tensor:
        heads = self.geometry.num_heads
        result = qk_TAh.clone()
        result[:, :heads] = norms.query.reference(qk_TAh[:, :heads])
        result[:, heads:] = norms.key.reference(qk_TAh[:, heads:])
        return result
