"""The attention block: fused QKV, rotary positions, one write to the KV store, paged attention."""

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.kv.store import write
from foretoken.layers.mlp import gate
from foretoken.layers.norm import RMSNorm
from foretoken.layers.rope import Rotation, rotate
from foretoken.ops.activation import sigmoid
from foretoken.ops.attention import Geometry
from foretoken.ops.attention.base import Attend
from foretoken.ops.linear import Linear
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.ops.row_operations import Turn, TurnNorms


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over each query head and each key head (Qwen3, Gemma 3), or over all of them."""

    query: RMSNorm
    key: RMSNorm
    whole: bool = False
    """Whether a norm reaches over all query heads, and one over all key heads (OLMo 2)."""
    after_turning: bool = False
    """Whether heads are turned first (Hunyuan)."""
    value: RMSNorm | None = None
    """Over each value head (Gemma 4)."""

    @property
    def is_usual(self) -> bool:
        """Whether a GPU's kernels norm heads as they turn them."""
        return not self.after_turning and self.value is None


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
    sinks_H: Tensor | None = None
    """float32, heads as attention has them (gpt-oss); None: it has none."""
    gate: Linear | None = None
    """[T, D] -> [T, H * h]: its sigmoid multiplies what attention gives (AFMoE)."""
    keeps: bool = True
    """Whether it makes keys and values; else it reads those of a layer before (Gemma 4), and `qkv`
    has queries alone."""

    def __call__(
        self, x_TD: Tensor, residual_TD: Tensor | None, layer_SKh: Tensor, step: StepState
    ) -> Tensor:
        """attention(x), plus the residual if there is one, over this layer's part of the store."""
        heads, kv = self.geometry.num_heads, self._num_kv_heads
        qkv_TA = self.qkv(x_TD)
        if self.norms is not None and self.norms.whole:
            self._norm_whole(qkv_TA, self.norms)
        qkv_TAh = qkv_TA.view(x_TD.shape[0], heads + 2 * kv, self.geometry.head_dim)
        kernels = backend_for(qkv_TA.device).rows(qkv_TA)
        if kernels is not None:
            kernels.turn_and_write(qkv_TA, layer_SKh, self.turn(step))
            if step.rotation.query_scale is not None:
                qkv_TAh[:, :heads] *= step.rotation.query_scale
            return self._attended(qkv_TAh[:, :heads], layer_SKh, step, x_TD, residual_TD)
        turned = qkv_TAh[:, : heads + kv]
        each = self.norms if self.norms is not None and not self.norms.whole else None
        if each is not None and not each.after_turning:
            turned = self._normed(turned, each)
        rotated = rotate(turned, step.rotation)
        if each is not None and each.after_turning:
            rotated = self._normed(rotated, each)
        if each is not None and each.value is not None:
            qkv_TAh[:, heads + kv :] = _by_head(each.value, qkv_TAh[:, heads + kv :])
        if step.rotation.query_scale is not None:
            rotated[:, :heads] *= step.rotation.query_scale
        if self.keeps:
            qkv_TAh[:, heads : heads + kv] = rotated[:, heads:]
            write(layer_SKh, step.slots_T, quantize_kv(qkv_TAh[:, heads:], layer_SKh.dtype))
        return self._attended(rotated[:, :heads], layer_SKh, step, x_TD, residual_TD)

    @property
    def kernels_know(self) -> bool:
        """Whether a GPU's kernels compute all of it."""
        usual = self.norms is None or self.norms.is_usual
        return usual and self.gate is None and self.keeps

    @property
    def _num_kv_heads(self) -> int:
        return self.geometry.num_kv_heads if self.keeps else 0

    def _attended(
        self,
        q_THh: Tensor,
        layer_SKh: Tensor,
        step: StepState,
        x_TD: Tensor,
        residual_TD: Tensor | None,
    ) -> Tensor:
        heads_TA = step.attend(q_THh, layer_SKh, self.sinks_H)
        if self.gate is not None:
            heads_TA = gate(torch.cat([self.gate(x_TD), heads_TA], dim=1), sigmoid)
        return self.out(heads_TA, residual_TD)

    def turn(self, step: StepState) -> Turn:
        """The step's rotation and slots as the compiled kernel takes them."""
        norms = None
        if self.norms is not None and not self.norms.whole:
            query, value = self.norms.query, self.norms.value
            norms = TurnNorms(
                query.weight_D,
                self.norms.key.weight_D,
                None if value is None else value.weight_D,
                query.eps,
                self.norms.after_turning,
            )
        return Turn(
            num_heads=self.geometry.num_heads,
            num_kv_heads=self._num_kv_heads,
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
        result[:, :heads] = _by_head(norms.query, qk_TAh[:, :heads])
        result[:, heads:] = _by_head(norms.key, qk_TAh[:, heads:])
        return result


def _by_head(norm: RMSNorm, x_THh: Tensor) -> Tensor:
    """The norm of each head."""
    heads: Tensor = norm(x_THh.reshape(-1, x_THh.shape[-1])).view(x_THh.shape)
    return heads
