"""Qwen3 (dense): Llama with an RMS norm of every query and key head, and a free head_dim.

The shape says so (`qk_norm`), so the Llama builder reads the tensors.
"""

from foretoken.models.llama import build

__all__ = ["build"]
