"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): each rounding error is made up for by the weights
that are not rounded yet, as far as the layer's inputs are correlated.

Knows matrices and the second moments of their inputs, nothing of models. Scales are chosen before
(`grid`), so the order in which inputs are rounded leaves no trace in the format.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.weights import IntWeights, Scheme
from foretoken.training.quantize.grid import best_grid

_BLOCK = 128
_WIDE = 4096
"""The factorization is done in float64 up to so many inputs, in float32 beyond."""


@final
class Moments:
    """The sum of x x^T over the rows that a layer was given."""

    def __init__(self, inputs: int) -> None:
        """Nothing seen yet of `inputs` inputs."""
        self.total_KK = torch.zeros(inputs, inputs)
        self.rows = 0

    def add(self, x_TK: Tensor) -> None:
        """Rows of any floating type."""
        wide_TK = x_TK.float()
        self.total_KK.addmm_(wide_TK.T, wide_TK)
        self.rows += x_TK.shape[0]

    def mean(self, name: str) -> Tensor:
        """float32 [K, K].

        Raises:
            CheckpointError: some input was infinite or no number.
        """
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

    def __init__(
        self, moments_KK: Tensor, *, damping: float = 0.01, activation_order: bool = True
    ) -> None:
        """Factorize the moments.

        Args:
            moments_KK: mean of x x^T over the inputs, float32.
            damping: part of the mean of the diagonal that is added to it.
            activation_order: round the inputs with the largest mean square first.
        """
        self.moments_KK = moments_KK
        self.importance_K = moments_KK.diagonal()
        self.order_K = torch.arange(moments_KK.shape[0])
        if activation_order:
            self.order_K = torch.argsort(self.importance_K, descending=True, stable=True)
        self.factor_KK = _factor(moments_KK[self.order_K][:, self.order_K], damping)


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


def _factor(moments_KK: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse, damped more where rounding asks for it."""
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
