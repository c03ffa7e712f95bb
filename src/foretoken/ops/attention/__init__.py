"""Attention over paged keys and values: a plain reference and a fast CPU twin."""

from foretoken.ops.attention.base import Attention, Geometry, Plan, SpanView
from foretoken.ops.attention.choose import choose_attention

__all__ = ["Attention", "Geometry", "Plan", "SpanView", "choose_attention"]
