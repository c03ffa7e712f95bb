"""Rounds 16-bit weights to nearest, in pieces of rows so that no large copy is made."""

import torch
from torch import Tensor

from foretoken.quant.weights import IntWeights, Scheme, short_scale

_PIECE = 1 << 22


def round_weights(weight_NK: Tensor, scheme: Scheme) -> IntWeights:
    """Quantize a matrix of a floating type on its device.

    Args:
        weight_NK: finite; K a multiple of the scheme's group.
        scheme: the larger a group's largest weight, the coarser its steps.
    """
    group = scheme.group or weight_NK.shape[1]
    assert weight_NK.shape[1] % group == 0, (weight_NK.shape, group)
    rows = max(1, _PIECE // weight_NK.shape[1])
    pieces = [_round(piece.float(), scheme) for piece in weight_NK.split(rows)]
    zeros = [piece.zero_NG for piece in pieces if piece.zero_NG is not None]
    return IntWeights(
        bits=scheme.bits,
        values_NK=torch.cat([piece.values_NK for piece in pieces]),
        scale_NG=torch.cat([piece.scale_NG for piece in pieces]),
        zero_NG=torch.cat(zeros) if zeros else None,
    )


def _round(weight_NK: Tensor, scheme: Scheme) -> IntWeights:
    groups = weight_NK.unflatten(1, (-1, scheme.group or weight_NK.shape[1]))
    if scheme.bits == 8:
        scale_NG = groups.abs().amax(2) / 127
        values = _steps(groups, scale_NG).round_().to(torch.int8)
        return IntWeights(bits=8, values_NK=values.flatten(1), scale_NG=scale_NG)
    if scheme.asymmetric:
        low, high = groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)
        scale_NG = short_scale((high - low) / 15)
        zero_NG = torch.where(scale_NG > 0, -low / scale_NG, 0.0).round_()
        centre = zero_NG[..., None]
    else:
        # The largest weight, whatever its sign, becomes -8: all sixteen steps are used.
        largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
        scale_NG, zero_NG = short_scale(largest[..., 0] / -8), None
        centre = torch.full((), 8.0)
    values = _steps(groups, scale_NG).add_(centre).round_().clamp_(0, 15).to(torch.uint8)
    return IntWeights(bits=4, values_NK=values.flatten(1), scale_NG=scale_NG, zero_NG=zero_NG)


def _steps(groups_NGk: Tensor, scale_NG: Tensor) -> Tensor:
    """Weights in steps of their scale; 0 in groups of zeros."""
    inverse = torch.where(scale_NG == 0, 0.0, 1 / scale_NG)
    return groups_NGk * inverse[..., None]
