"""Which attention a model gets on its device."""

from foretoken.ops.attention.base import Attention, Geometry
from foretoken.ops.attention.fast import FastAttention, Tiling


def choose_attention(geometry: Geometry, *, batch_invariant: bool) -> Attention:
    """The fastest attention for `geometry` that keeps the promise asked for."""
    return FastAttention(geometry, Tiling(rows=8, block=512) if batch_invariant else None)
