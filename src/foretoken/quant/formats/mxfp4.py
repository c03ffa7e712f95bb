"""Experts in blocks of 32 four-bit floats with a power of two each, as OpenAI publishes gpt-oss.

Values and scales are those of the OCP MX specification; neighbours share a byte. They become ggml's
blocks, where a byte has values 16 apart, which kernels keep as they are.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.errors import CheckpointError
from foretoken.quant.arrange import Weights
from foretoken.quant.blocks import BlockWeights
from foretoken.quant.formats.base import Format, RawTensors, check_shape, group_size

_INPUTS = 32


@final
class Mxfp4Format(Format):
    """`blocks` and `scales` of an expert; all other matrices are floats."""

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        name = f"{module}.blocks"
        if not tensors.has(name):
            return None
        packed, scales = (tensors.raw(f"{module}.{part}").cpu() for part in ("blocks", "scales"))
        for part, tensor in ((name, packed), (f"{module}.scales", scales)):
            if tensor.dtype != torch.uint8:
                raise CheckpointError("tensor type", f"{part} {tensor.dtype}", "uint8")
        groups = scales.shape[-1]
        if group_size(name, inputs, groups) != _INPUTS:
            raise CheckpointError(
                "groups", f"{name}: {groups} of {inputs} inputs", "32 inputs each"
            )
        check_shape(name, packed, (*scales.shape, _INPUTS // 2))
        return BlockWeights.as_stored("MXFP4", _ggml_rows(packed, scales))


def _ggml_rows(packed: Tensor, scales_NG: Tensor) -> Tensor:
    """uint8 [N, G * 17] of nibbles [N, G, 16] and exponents."""
    values = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    halves = values[..., : _INPUTS // 2] | values[..., _INPUTS // 2 :] << 4
    return torch.cat([scales_NG[..., None], halves], -1).flatten(1)
