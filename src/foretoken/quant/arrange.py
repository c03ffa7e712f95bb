"""Matrices of floats or integers, rearranged alike: rows and columns reordered, parts of them.

What is done to integer weights keeps the matrix they stand for, exactly: groups are only ever made
smaller, by giving the parts of a group the same scale.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from foretoken.quant.blocks import BlockWeights
from foretoken.quant.weights import IntWeights
from foretoken.shape.stored import GROUPS

Weights = Tensor | IntWeights | BlockWeights
"""A matrix [N, K]."""


def change_rows(weights: Weights, change: Callable[[Tensor], Tensor]) -> Weights:
    """Apply `change`, which picks or reorders along the first dimension."""
    if isinstance(weights, Tensor):
        return change(weights)
    if isinstance(weights, BlockWeights):
        return weights.changed_rows(change)
    return replace(
        weights,
        values_NK=change(weights.values_NK),
        scale_NG=change(weights.scale_NG),
        zero_NG=None if weights.zero_NG is None else change(weights.zero_NG),
    )


def change_columns(
    weights: Weights, change: Callable[[Tensor], Tensor], width: int
) -> Weights | None:
    """Apply to the inputs what reorders blocks of `width` along the first dimension.

    Args:
        weights: the matrix.
        change: from [K, N] to [K, N]; also from [K / g, N], where g divides `width`.
        width: inputs that stay together.

    Returns:
        None, if no smaller group that kernels have divides the width.
    """
    if isinstance(weights, Tensor):
        return change(weights.T).T.contiguous()
    if isinstance(weights, BlockWeights):
        return weights.changed_columns(change, width)
    if weights.group and width % weights.group:
        fitting = [group for group in GROUPS if math.gcd(weights.group, width) % group == 0]
        if not fitting:
            return None
        weights = regrouped(weights, fitting[0])

    def turned(parts_NX: Tensor) -> Tensor:
        return change(parts_NX.T).T.contiguous()

    if not weights.group:
        return replace(weights, values_NK=turned(weights.values_NK))
    return replace(
        weights,
        values_NK=turned(weights.values_NK),
        scale_NG=turned(weights.scale_NG),
        zero_NG=None if weights.zero_NG is None else turned(weights.zero_NG),
    )


def regrouped(weights: IntWeights, group: int) -> IntWeights:
    """The matrix in groups of `group` inputs, which must divide its own."""
    inputs = weights.values_NK.shape[1]
    old = weights.group or inputs
    assert old % group == 0, (old, group)
    times = old // group
    if times == 1 and weights.scale_NG.shape[1] == inputs // group:
        return weights
    zero_NG = weights.zero_NG
    return replace(
        weights,
        scale_NG=weights.scale_NG.repeat_interleave(times, 1),
        zero_NG=None if zero_NG is None else zero_NG.repeat_interleave(times, 1),
    )


def halve_heads(weights: Weights, heads: int) -> Weights:
    """Rows of so many heads half by half, from the order of interleaved rotary positions."""

    def turn(rows: Tensor) -> Tensor:
        pairs: Tensor = rows.unflatten(0, (heads, -1, 2)).transpose(1, 2)
        return pairs.flatten(0, 2)

    return change_rows(weights, turn)


def split_rows(weights: Weights, sizes: Sequence[int]) -> list[Weights]:
    """Consecutive rows, so many in each part."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]

    def part(start: int, stop: int) -> Callable[[Tensor], Tensor]:
        return lambda rows: rows[start:stop]

    pairs = zip(ends, sizes, strict=True)
    return [change_rows(weights, part(end - size, end)) for end, size in pairs]


def join_rows(parts: Sequence[Weights]) -> list[Weights]:
    """One matrix over the other, as few matrices as there are kinds side by side."""
    joined: list[Weights] = [parts[0]]
    for part in parts[1:]:
        both = _join(joined[-1], part)
        if both is None:
            joined.append(part)
        else:
            joined[-1] = both
    return joined


def _join(above: Weights, below: Weights) -> Weights | None:
    """Two parts as one matrix; None: they are of different kinds."""
    if isinstance(above, Tensor) or isinstance(below, Tensor):
        both = isinstance(above, Tensor) and isinstance(below, Tensor)
        return torch.cat([above, below]) if both else None  # type: ignore[list-item]
    if isinstance(above, BlockWeights) or isinstance(below, BlockWeights):
        both = isinstance(above, BlockWeights) and isinstance(below, BlockWeights)
        return above.joined(below) if both else None  # type: ignore[union-attr,arg-type]
    if above.bits != below.bits:
        return None
    if above.scale_NG.shape[1] != below.scale_NG.shape[1]:
        inputs = above.values_NK.shape[1]
        group = math.gcd(above.group or inputs, below.group or inputs)
        above, below = regrouped(above, group), regrouped(below, group)
    zero_NG = None
    if above.zero_NG is not None or below.zero_NG is not None:
        zero_NG = torch.cat([_zeros(above), _zeros(below)])
    return IntWeights(
        bits=above.bits,
        values_NK=torch.cat([above.values_NK, below.values_NK]),
        scale_NG=torch.cat([above.scale_NG, below.scale_NG]),
        zero_NG=zero_NG,
    )


def _zeros(weights: IntWeights) -> Tensor:
    if weights.zero_NG is None:
        return torch.full_like(weights.scale_NG, 8.0)
    return weights.zero_NG


def for_kernels(weights: IntWeights | BlockWeights) -> IntWeights | BlockWeights | None:
    """The matrix in groups that the kernels have; None: there are none that fit."""
    if isinstance(weights, BlockWeights):
        return weights
    inputs, group = weights.values_NK.shape[1], weights.group
    if group in GROUPS or (not group and weights.bits == 8):
        return weights
    fitting = [smaller for smaller in GROUPS if (group or inputs) % smaller == 0]
    return regrouped(weights, fitting[0]) if fitting else None
