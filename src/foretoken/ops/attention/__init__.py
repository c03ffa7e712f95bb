"""Attention over paged keys and values: a plan per step, one call per layer."""

from foretoken.ops.attention.base import Attention, Geometry, SpanWindow
from foretoken.ops.attention.reference import ReferenceAttention
from foretoken.ops.attention.tiled import TiledAttention
from foretoken.ops.attention.torch_sdpa import torch_attention

__all__ = [
    "Attention",
    "Geometry",
    "ReferenceAttention",
    "SpanWindow",
    "TiledAttention",
    "torch_attention",
]
