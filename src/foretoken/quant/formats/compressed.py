"""compressed-tensors checkpoints (llm-compressor): packed or plain integers, and 8-bit floats.

Tensors of a module: `weight_packed` (4 or 8 bits along inputs, values + 8 or 128) or an int8
`weight`, with `weight_scale`, perhaps `weight_zero_point` (packed along outputs, if the weights
are) and `weight_g_idx`; or a float8 `weight` with `weight_scale`.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.arrange import Weights
from foretoken.quant.formats.base import Format, RawTensors, check_shape, group_size
from foretoken.quant.formats.fp8 import leave_activation_scales, scaled_floats
from foretoken.quant.formats.unpacking import bits_of, by_index, in_group_order, unpack, weights_of


@final
class CompressedFormat(Format):
    """Whichever of its layouts a module has: mixed checkpoints differ from module to module."""

    def __init__(self, block: tuple[int, int]) -> None:
        """Outputs and inputs of a block, where 8-bit floats have a scale per block."""
        self._block = block

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        if tensors.has(f"{module}.weight_packed"):
            return _packed(tensors, module, inputs)
        if not tensors.has(f"{module}.weight_scale"):
            return None
        weight_NK = tensors.raw(f"{module}.weight")
        if weight_NK.is_floating_point():
            scale = tensors.raw(f"{module}.weight_scale")
            _refuse_zeros(tensors, module)
            leave_activation_scales(tensors, module)
            return scaled_floats(module, weight_NK, scale, self._block)
        if weight_NK.dtype != torch.int8:
            raise CheckpointError("tensor type", f"{module}.weight {weight_NK.dtype}", "int8")
        scale_NG = _scales(tensors, module, weight_NK.shape[0])
        values_NK, zero_NG = weight_NK.view(torch.uint8) ^ 128, None
        if tensors.has(f"{module}.weight_zero_point"):
            stored = tensors.raw(f"{module}.weight_zero_point")
            zero_NG = check_shape(module, stored, scale_NG.shape).to(torch.int16) + 128
        return _in_groups(tensors, module, values_NK, scale_NG, zero_NG, 8)


def _packed(tensors: RawTensors, module: str, inputs: int) -> Weights:
    words = tensors.raw(f"{module}.weight_packed")
    if tensors.has(f"{module}.weight_shape"):
        shape = tensors.raw(f"{module}.weight_shape").tolist()
        if shape != [words.shape[0], inputs]:
            allowed = f"{[words.shape[0], inputs]}, as config.json says"
            raise CheckpointError("tensor shape", f"{module}.weight_shape {shape}", allowed)
    bits = bits_of(module, inputs, words.shape[1])
    values_NK = unpack(words, bits)[:, :inputs]
    scale_NG = _scales(tensors, module, words.shape[0])
    zero_NG = None
    if tensors.has(f"{module}.weight_zero_point"):
        zero_NG = _packed_zeros(tensors, module, scale_NG, bits)
    return _in_groups(tensors, module, values_NK, scale_NG, zero_NG, bits)


def _packed_zeros(tensors: RawTensors, module: str, scale_NG: Tensor, bits: int) -> Tensor:
    outputs, groups = scale_NG.shape
    stored = tensors.raw(f"{module}.weight_zero_point")
    if stored.dtype != torch.int32:
        whole = check_shape(module, stored, scale_NG.shape).to(torch.int16)
        return whole + (1 << (bits - 1))
    words = check_shape(module, stored, (-(-outputs * bits // 32), groups))
    return unpack(words.T, bits)[:, :outputs].T.contiguous()


def _in_groups(
    tensors: RawTensors,
    module: str,
    values_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    bits: int,
) -> Weights:
    inputs, groups = values_NK.shape[1], scale_NG.shape[1]
    group = group_size(module, inputs, groups)
    name = f"{module}.weight_g_idx"
    if tensors.has(name):
        index = check_shape(name, tensors.raw(name), (inputs,))
        unused = bool((index < 0).all())
        if not unused and not in_group_order(index, group):
            middle = torch.full_like(scale_NG, 1 << (bits - 1))
            return by_index(values_NK, scale_NG, middle if zero_NG is None else zero_NG, index)
    return weights_of(values_NK, scale_NG, zero_NG, bits)


def _scales(tensors: RawTensors, module: str, outputs: int) -> Tensor:
    """[N, G]; one for the whole matrix is given to every output."""
    scale = tensors.raw(f"{module}.weight_scale")
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1).contiguous()
    if scale.ndim == 1:
        scale = scale[:, None]
    return check_shape(f"{module}.weight_scale", scale, (outputs, scale.shape[1]))


def _refuse_zeros(tensors: RawTensors, module: str) -> None:
    name = f"{module}.weight_zero_point"
    if tensors.has(name) and bool(tensors.raw(name).float().any()):
        raise CheckpointError("tensor", name, "zeros only, beside floats of 8 bits")
