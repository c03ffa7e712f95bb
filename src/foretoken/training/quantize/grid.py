"""The values that the weights of a group may take, chosen by what the inputs of a layer are.

Knows nothing of files or layers. Symmetric 4-bit groups reach 8 steps on one side and 7 on the
other; which side is part of the choice, so scales may be negative.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.quant.weights import IntWeights, Scheme, short_scale

_SHRINKS = tuple(1.0 - 0.03125 * step for step in range(14))
"""Parts of the full range that are tried: cutting off the largest weights makes finer steps."""
_PIECE = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A group's weights are (level - zero) * scale, level a whole number from low to high."""

    scale_NG: Tensor
    """float32."""
    zero_NG: Tensor
    """float32, whole numbers."""
    low: int
    high: int

    def levels(self, weight_N: Tensor, group: int) -> Tensor:
        """The nearest level of weights of one input, as float32."""
        return _levels(self, weight_N, self.scale_NG[:, group], self.zero_NG[:, group])

    def floats(self, level_N: Tensor, group: int) -> Tensor:
        """The weights that levels of one input stand for."""
        return (level_N - self.zero_NG[:, group]) * self.scale_NG[:, group]

    def weights(self, level_NK: Tensor, scheme: Scheme) -> IntWeights:
        """All levels as integer weights."""
        if scheme.bits == 8:
            values_NK = level_NK.to(torch.int8)
            return IntWeights(bits=8, values_NK=values_NK, scale_NG=self.scale_NG)
        return IntWeights(
            bits=4,
            values_NK=level_NK.to(torch.uint8),
            scale_NG=self.scale_NG,
            zero_NG=self.zero_NG if scheme.asymmetric else None,
        )


def best_grid(weight_NK: Tensor, importance_K: Tensor, scheme: Scheme) -> Grid:
    """For each group the grid with the smallest weighted square error, of a few dozen.

    Args:
        weight_NK: float32; K a multiple of the scheme's group.
        importance_K: mean square of each input.
        scheme: bits, groups and symmetry.
    """
    group = scheme.group or weight_NK.shape[1]
    importance_Gk = importance_K.unflatten(0, (-1, group))
    rows = max(1, _PIECE // weight_NK.shape[1])
    found = [
        _search(piece.unflatten(1, (-1, group)), importance_Gk, scheme)
        for piece in weight_NK.split(rows)
    ]
    return Grid(
        scale_NG=torch.cat([grid.scale_NG for grid in found]),
        zero_NG=torch.cat([grid.zero_NG for grid in found]),
        low=found[0].low,
        high=found[0].high,
    )


def _search(groups_NGk: Tensor, importance_Gk: Tensor, scheme: Scheme) -> Grid:
    best, least_NG = None, groups_NGk.new_full(groups_NGk.shape[:2], torch.inf)
    for grid in _candidates(groups_NGk, scheme):
        scale, zero = grid.scale_NG[..., None], grid.zero_NG[..., None]
        error = _levels(grid, groups_NGk, scale, zero).sub_(zero).mul_(scale).sub_(groups_NGk)
        error_NG = error.square_().mul_(importance_Gk).sum(2)
        if best is None:
            best, least_NG = grid, error_NG
            continue
        better_NG = error_NG < least_NG
        least_NG = torch.where(better_NG, error_NG, least_NG)
        best = Grid(
            scale_NG=torch.where(better_NG, grid.scale_NG, best.scale_NG),
            zero_NG=torch.where(better_NG, grid.zero_NG, best.zero_NG),
            low=grid.low,
            high=grid.high,
        )
    assert best is not None, "no candidates"
    return best


def _candidates(groups_NGk: Tensor, scheme: Scheme) -> Iterator[Grid]:
    """Full range first, which is round-to-nearest's."""
    if scheme.asymmetric:
        low_NG, high_NG = groups_NGk.amin(2).clamp_(max=0), groups_NGk.amax(2).clamp_(min=0)
        for shrink in _SHRINKS:
            scale_NG = short_scale((high_NG - low_NG) * (shrink / 15))
            zero_NG = torch.where(scale_NG > 0, -low_NG * shrink / scale_NG, 0.0).round_()
            yield Grid(scale_NG=scale_NG, zero_NG=zero_NG, low=0, high=15)
        return
    largest = groups_NGk.gather(2, groups_NGk.abs().argmax(2, keepdim=True))[..., 0]
    if scheme.bits == 8:
        zero_NG = torch.zeros_like(largest)
        for shrink in _SHRINKS:
            scale_NG = largest.abs() * (shrink / 127)
            yield Grid(scale_NG=scale_NG, zero_NG=zero_NG, low=-127, high=127)
        return
    zero_NG = torch.full_like(largest, 8.0)
    for shrink in _SHRINKS:
        for reach in (-8, 7):
            scale_NG = short_scale(largest * (shrink / reach))
            yield Grid(scale_NG=scale_NG, zero_NG=zero_NG, low=0, high=15)


def _levels(grid: Grid, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    inverse = torch.where(scale == 0, 0.0, 1 / scale)
    return (weight * inverse).add_(zero).round_().clamp_(grid.low, grid.high)
