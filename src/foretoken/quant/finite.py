"""Refuses numbers that are none: one NaN or infinite weight makes every output meaningless.

A sum tells in nearly all cases, since nothing finite comes of it otherwise; only where the sum
overflows are numbers looked at one by one.
"""

import math

from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.kernels.library import Library
from foretoken.quant.blocks import BlockWeights
from foretoken.quant.weights import IntWeights

_PIECE = 32_000
"""Numbers that PyTorch sums in the calling thread: the barriers of its own wait for a core that is
taken, and reading memory is all there is to do."""


def check_finite(
    name: str, weights: Tensor | IntWeights | BlockWeights, library: Library | None = None
) -> None:
    """Check the floats of a tensor, or the scales and zero points of integer weights.

    Args:
        name: of the tensor, for the error.
        weights: what to check.
        library: the kernels, which look through blocks in all of their threads; None: PyTorch does.

    Raises:
        CheckpointError: some are NaN or infinite; with how many, and the name.
    """
    if isinstance(weights, BlockWeights):
        strange = weights.strange_numbers(library)
        if strange:
            given = f"{name} (scales): {strange} NaN or infinite, {weights.kind}"
            raise CheckpointError("weights", given, "finite numbers as float16")
        return
    if isinstance(weights, IntWeights):
        check_finite(f"{name} (scales)", weights.scale_NG)
        if weights.zero_NG is not None:
            check_finite(f"{name} (zero points)", weights.zero_NG)
        return
    if not weights.is_floating_point() or weights.is_meta:
        return
    flat = weights.flatten()
    pieces = flat.split(_PIECE if flat.device.type == "cpu" else max(1, flat.numel()))
    doubtful = [piece for piece in pieces if not math.isfinite(piece.sum().item())]
    nan = sum(int(piece.isnan().sum()) for piece in doubtful)
    infinite = sum(int(piece.isinf().sum()) for piece in doubtful)
    if nan or infinite:
        given = f"{name}: {nan} NaN and {infinite} infinite of {flat.numel()}"
        allowed = f"finite numbers as {str(weights.dtype).removeprefix('torch.')}"
        raise CheckpointError("weights", given, allowed)
