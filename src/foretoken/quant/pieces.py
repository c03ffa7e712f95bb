"""Integer weights packed for the C kernels; floats are rounded in pieces of rows.

No second copy of a large matrix is ever there: each piece is rounded, packed, and copied into its
place.
"""

from torch import Tensor

from foretoken.kernels.library import Library
from foretoken.kernels.linear import PANEL, Packed, pack_int4, pack_int8, stack_packed
from foretoken.quant.rounding import round_weights
from foretoken.quant.weights import IntWeights, Scheme

_PIECE = 1 << 20


def pack_integers(library: Library, weights: IntWeights) -> Packed:
    """Pack integers of groups that the kernels have (`arrange.for_kernels`)."""
    if weights.bits == 8:
        return pack_int8(library, weights.values_NK, weights.scale_NG)
    return pack_int4(library, weights.values_NK, weights.scale_NG, weights.zero_NG)


def pack_rounded(library: Library, weight_NK: Tensor, scheme: Scheme) -> Packed:
    """Round and pack a matrix of floats."""
    rows = _rows_of_a_piece(weight_NK.shape[1])
    pieces = (
        pack_integers(library, round_weights(piece, scheme)) for piece in weight_NK.split(rows)
    )
    return stack_packed(library, pieces, weight_NK.shape[0])


def _rows_of_a_piece(inputs: int) -> int:
    """Whole panels, a few million weights."""
    return max(1, _PIECE // inputs // PANEL) * PANEL
