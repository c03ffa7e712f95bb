"""Weights as 8-bit floats with scales: no kernel holds them, so they are multiplied out.

The format of `quant_method: fp8`, and what compressed-tensors' float layouts share with it.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.arrange import Weights
from foretoken.quant.formats.base import Format, RawTensors, check_shape

_OF_ACTIVATIONS = ("activation_scale", "input_scale")
"""Measured for activations of 8 bits, which keep their type here."""
_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@final
class Fp8Format(Format):
    """`weight` with `weight_scale_inv` per block, as DeepSeek and Qwen write it, or per matrix."""

    def __init__(self, block: tuple[int, int]) -> None:
        """Outputs and inputs of a block."""
        self._block = block

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        for name in (f"{module}.weight_scale_inv", f"{module}.weight_scale"):
            if tensors.has(name):
                leave_activation_scales(tensors, module)
                weight_NK, scale = tensors.raw(f"{module}.weight"), tensors.raw(name)
                return scaled_floats(module, weight_NK, scale, self._block)
        return None


def leave_activation_scales(tensors: RawTensors, module: str) -> None:
    """Count as used what a checkpoint knows of the inputs of `module`."""
    for name in (f"{module}.{scale}" for scale in _OF_ACTIVATIONS):
        if tensors.has(name):
            tensors.ignore(name)


def scaled_floats(name: str, weight_NK: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Weights times scales, in float32.

    Args:
        name: of the module, for errors.
        weight_NK: float8.
        scale: one; one per output [N] or [N, 1]; [N, G] for groups of inputs; or one per block.
        block: outputs and inputs of such a block.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    if weight_NK.dtype not in _TYPES:
        allowed = "float8_e4m3fn or float8_e5m2"
        raise CheckpointError("tensor type", f"{name}.weight {weight_NK.dtype}", allowed)
    outputs, inputs = weight_NK.shape
    whole, scale = weight_NK.float(), scale.float()
    if scale.numel() == 1:
        return whole.mul_(scale.reshape(()))
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.shape[0] == outputs and inputs % scale.shape[1] == 0:
        return whole.mul_(scale.repeat_interleave(inputs // scale.shape[1], 1))
    check_shape(f"{name} scales", scale, (-(-outputs // block[0]), -(-inputs // block[1])))
    wide = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return whole.mul_(wide[:outputs, :inputs])
