"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): each rounding error is made up for by the weights
that are not rounded yet, as far as the layer's inputs are correlated.

Knows matrices and the second moments of their inputs, nothing of models or files. The values that a
group may take (`Grid`) are chosen before, so the order in which inputs are rounded leaves no trace
in the format. Symmetric 4-bit groups reach 8 steps on one side and 7 on the other; which side is
part of the choice, so scales may be negative.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
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


_BLOCK = 128
_DAMPING = 0.01
"""The share of the inputs' mean square that is added to each: keeps errors from moving far."""
_WIDE = 4096
"""The factorization is done in float64 up to so many inputs, in float32 beyond."""


@final
class Moments:
    """The sum of x x^T over the rows that a layer was given."""

    def __init__(self, inputs: int) -> None:
        self.total_KK = torch.zeros(inputs, inputs)
        self.rows = 0

    def add(self, x_TK: Tensor) -> None:
        """Rows of any floating type."""
        wide_TK = x_TK.float()
        self.total_KK.addmm_(wide_TK.T, wide_TK)
        self.rows += x_TK.shape[0]

    def mean(self, name: str) -> Tensor:
        """float32 [K, K]. Raises CheckpointError: some input was infinite or no number."""
        assert self.rows > 0, name
        if not bool(self.total_KK.diagonal().isfinite().all()):
            given = f"infinite inputs, or no numbers, of {name}"
            raise CheckpointError(
                "--calibrate", given, "another text, or a checkpoint without faults"
            )
        return self.total_KK / self.rows


@final
class SeenInputs:
    """What matrices that read the same inputs share: the order of rounding, how errors spread."""

    def __init__(self, moments_KK: Tensor) -> None:
        """`moments_KK` is the mean of x x^T over the inputs, float32."""
        self.moments_KK = moments_KK
        self.importance_K = moments_KK.diagonal()
        self.order_K = torch.argsort(self.importance_K, descending=True, stable=True)
        """Inputs with the largest mean square are rounded first."""
        self.factor_KK = _factor(moments_KK[self.order_K][:, self.order_K])


def gptq(weight_NK: Tensor, seen: SeenInputs, scheme: Scheme) -> IntWeights:
    """Round a matrix so that its outputs, not its weights, change least.

    Args:
        weight_NK: of a floating type; K a multiple of the scheme's group.
        seen: the inputs that it reads.
        scheme: bits, groups and symmetry.
    """
    weight_NK = weight_NK.float()
    grid = best_grid(weight_NK, seen.importance_K, scheme)
    inputs, order_K, factor_KK = weight_NK.shape[1], seen.order_K, seen.factor_KK
    left_KN = weight_NK.T[order_K].contiguous()
    level_KN = torch.empty_like(left_KN)
    groups = (order_K // (scheme.group or inputs)).tolist()
    for start in range(0, inputs, _BLOCK):
        stop = min(start + _BLOCK, inputs)
        errors_kN = left_KN.new_empty(stop - start, left_KN.shape[1])
        for at in range(start, stop):
            level_KN[at] = level_N = grid.levels(left_KN[at], groups[at])
            error_N = (left_KN[at] - grid.floats(level_N, groups[at])) / factor_KK[at, at]
            left_KN[at + 1 : stop].addr_(factor_KK[at, at + 1 : stop], error_N, alpha=-1)
            errors_kN[at - start] = error_N
        left_KN[stop:].addmm_(factor_KK[start:stop, stop:].T, errors_kN, alpha=-1)
    level_NK = torch.empty_like(weight_NK)
    level_NK[:, order_K] = level_KN.T
    return grid.weights(level_NK, scheme)


def output_error(rounded: IntWeights, weight_NK: Tensor, moments_KK: Tensor) -> float:
    """Root mean square of the change of a layer's outputs over that of the outputs."""
    weight_NK = weight_NK.float()
    change_NK = rounded.dequantized(torch.float32).sub_(weight_NK)
    changed, whole = (
        float(((matrix_NK @ moments_KK) * matrix_NK).sum().clamp_min(0))
        for matrix_NK in (change_NK, weight_NK)
    )
    return (changed / whole) ** 0.5 if whole else 0.0


def _factor(moments_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse, damped more where rounding asks for it."""
    damping = _DAMPING
    wide = torch.float64 if moments_KK.shape[0] <= _WIDE else torch.float32
    mean = float(moments_KK.diagonal().mean()) or 1.0
    while True:
        damped_KK = moments_KK.to(wide)
        damped_KK.diagonal().add_(damping * mean)
        lower_KK, failed = torch.linalg.cholesky_ex(damped_KK)
        if not failed:
            inverse_KK = torch.cholesky_inverse(lower_KK)
            upper_KK, failed = torch.linalg.cholesky_ex(inverse_KK, upper=True)
        if not failed:
            factor_KK: Tensor = upper_KK.float()
            return factor_KK
        damping *= 10
        assert damping < 1e6, "moments are positive semidefinite"
