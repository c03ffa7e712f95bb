"""Decoder layers of a head, made of its trained ones for kernels that run whole layers."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from foretoken.layers.attention import AttentionBlock, HeadNorms
from foretoken.layers.mlp import GatedMLP
from foretoken.layers.norm import RMSNorm
from foretoken.ops.activation import ACTIVATIONS
from foretoken.ops.attention import Geometry
from foretoken.proposers.heads.linears import HeadLinears
from foretoken.proposers.heads.parts import HeadAttention, HeadMLP, HeadShape, group_major


@final
@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """Makes parts of decoder layers of a head's: matrices fused, query heads in the order that
    attention wants."""

    shape: HeadShape
    make: HeadLinears

    def norm(self, module: nn.Module) -> RMSNorm:
        return RMSNorm(module.get_parameter("weight").detach(), self.shape.rms_norm_eps)

    def attention(self, module: HeadAttention, geometry: Geometry) -> AttentionBlock:
        """The same attention over pages."""
        q, k, v = module.q_proj, module.k_proj, module.v_proj
        own_N: Tensor | None = q.bias
        bias_N: Tensor | None = None
        norms: HeadNorms | None = None
        if own_N is not None:
            own_N = self._group_major(own_N.detach()[:, None])[:, 0]
            bias_N = torch.cat([own_N, k.bias.detach(), v.bias.detach()])
        if isinstance(module.q_norm, nn.RMSNorm):
            norms = HeadNorms(self.norm(module.q_norm), self.norm(module.k_norm))
        return AttentionBlock(
            qkv=self.make.of([q, k, v], bias_N, first=self._group_major),
            out=self.make.back(module.o_proj, self._group_major, self.shape.head_dim),
            geometry=geometry,
            norms=norms,
        )

    def mlp(self, module: HeadMLP) -> GatedMLP:
        return GatedMLP(
            gate_up=self.make.of([module.gate_proj, module.up_proj]),
            down=self.make.of([module.down_proj], adds_residual=True),
            activate=ACTIVATIONS["silu"],
        )

    def _group_major(self, rows: Tensor) -> Tensor:
        return group_major(rows, self.shape)
