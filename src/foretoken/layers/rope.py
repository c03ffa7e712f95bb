"""Rotary positions (Su et al. 2021) in the half-split layout of Hugging Face Llama.

The tables are computed once in float32 for every position and stored in the model's type; a step
gathers its rows once, for all layers that share them. A row depends on its position alone, never
on how long the sequence is or was: keys that were kept stay right, and drafts change nothing.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.shape import RopeShape


class Rotation(NamedTuple):
    """Factors of one step's tokens, [T, 1, r]; the first half of `sin` carries the minus sign.

    r may be smaller than the head: the dimensions after it are not turned."""

    cos: Tensor
    sin: Tensor
    query_scale: Tensor | None = None
    """[T, 1, 1]: what queries are multiplied by after they are turned; None: nothing."""


class RotaryTable:
    """cos and sin for positions [0, max_positions)."""

    def __init__(self, rope: RopeShape, *, max_positions: int, like: Tensor) -> None:
        """Compute the tables in the type and on the device of `like`.

        Args:
            rope: what is turned how fast.
            max_positions: how far sequences can reach. Longrope takes its long factors for all
                positions if this is beyond the original context, else the short ones.
            like: type and device.
        """
        positions = torch.arange(max_positions).float()
        if rope.rope_type == "dynamic":
            angles = _dynamic_angles(rope, positions)
        else:
            angles = torch.outer(positions, _frequencies(rope, max_positions))
        cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
        self.cos = torch.cat([cos, cos], dim=-1)[:, None].to(like.device, like.dtype)
        self.sin = torch.cat([-sin, sin], dim=-1)[:, None].to(like.device, like.dtype)
        self.query_scale: Tensor | None = None
        if rope.query_growth:
            periods = torch.floor(positions / rope.original_positions)
            scale = 1 + rope.query_growth * torch.log(1 + periods)
            self.query_scale = scale[:, None, None].to(like.device, like.dtype)

    def at(self, positions_T: Tensor) -> Rotation:
        """The rows of these positions."""
        tables = (self.cos, self.sin, self.query_scale)
        cos, sin, scale = (
            None if table is None else table.index_select(0, positions_T) for table in tables
        )
        assert cos is not None and sin is not None, "both are there"
        return Rotation(cos, sin, scale)


def rotate(x_THh: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the first dimensions of every head of every token."""
    width = rotation.cos.shape[-1]
    turned = x_THh if width == x_THh.shape[-1] else x_THh[..., :width]
    swapped = turned.roll(width // 2, -1)
    rotated = torch.addcmul(turned * rotation.cos, swapped, rotation.sin)
    return rotated if turned is x_THh else torch.cat([rotated, x_THh[..., width:]], dim=-1)


def _exponents(rope: RopeShape) -> Tensor:
    return torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim


def _frequencies(rope: RopeShape, max_positions: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [rotary_dim / 2]."""
    plain = 1.0 / rope.theta ** _exponents(rope)
    if rope.turned_pairs is not None:
        plain[rope.turned_pairs :] = 0.0
    if rope.rope_type == "none":
        return torch.zeros_like(plain)  # turned by nothing, cos is 1 and sin 0
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, plain)
    if rope.rope_type == "yarn":
        return _yarn(rope, plain)
    if rope.rope_type == "longrope":
        long = max_positions > rope.original_positions
        factors = torch.tensor(rope.long_factor if long else rope.short_factor)
        return 1.0 / (factors * rope.theta ** _exponents(rope))
    assert rope.rope_type == "default", rope.rope_type
    return plain


def _llama3(rope: RopeShape, plain: Tensor) -> Tensor:
    """Slow frequencies are divided, fast ones stay, those between are blended."""
    turns = rope.original_positions * plain / (2 * math.pi)
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: RopeShape, plain: Tensor) -> Tensor:
    """Dimensions that turn often stay, those that turn rarely are divided, a ramp between."""
    low, high = (_yarn_dimension(rope, turns) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(plain.shape[0]).float() - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * ramp + plain * (1 - ramp)


def _yarn_dimension(rope: RopeShape, turns: float) -> float:
    """The dimension that turns this often within the original context."""
    position = rope.original_positions / (turns * 2 * math.pi)
    return rope.rotary_dim * math.log(position) / (2 * math.log(rope.theta))


def _dynamic_angles(rope: RopeShape, positions: Tensor) -> Tensor:
    """Each position turns as it would if it were the last of its sequence: within the original
    context as trained, beyond it with a base that grows with the position."""
    lengths = (positions + 1).clamp_min(rope.original_positions).double()
    stretch = rope.factor * lengths / rope.original_positions - (rope.factor - 1)
    bases = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
    frequencies = 1.0 / bases.float()[:, None] ** _exponents(rope)
    return positions[:, None] * frequencies
