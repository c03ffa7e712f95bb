"""GPTQ checkpoints: `qweight` packed along inputs, `qzeros` along outputs, `scales`, `g_idx`.

Layout as AutoGPTQ and GPTQModel write it; method: Frantar et al. 2022 (arXiv 2210.17323). Where
inputs were quantized in another order than they lie (desc_act), their groups are scattered and no
kernel holds them: such a matrix is multiplied out.
"""

from typing import final

import torch
from torch import Tensor

from foretoken.quant.arrange import Weights
from foretoken.quant.formats.base import Format, RawTensors, check_shape, group_size
from foretoken.quant.formats.unpacking import bits_of, by_index, in_group_order, unpack, weights_of


@final
class GptqFormat(Format):
    """4 and 8 bits, symmetric or not."""

    def __init__(self, *, zeros_less_one: bool) -> None:
        """The first format, `gptq`, stores zero points less 1; `gptq_v2` as they are."""
        self._less = int(zeros_less_one)

    def matrix(self, tensors: RawTensors, module: str, inputs: int) -> Weights | None:
        if not tensors.has(f"{module}.qweight"):
            return None
        words = tensors.raw(f"{module}.qweight")
        bits = bits_of(module, inputs, words.shape[0])
        values_NK = unpack(words.T, bits)
        scale_NG = tensors.raw(f"{module}.scales").T.contiguous()
        outputs, groups = scale_NG.shape
        check_shape(f"{module}.qweight", words, (-(-inputs * bits // 32), outputs))
        packed = (groups, -(-outputs * bits // 32))
        zeros = unpack(check_shape(module, tensors.raw(f"{module}.qzeros"), packed), bits)
        zero_NG = ((zeros[:, :outputs] + self._less) & ((1 << bits) - 1)).T.contiguous()
        self._drop_empty_bias(tensors, module)
        index = self._index(tensors, module, inputs)
        values_NK = values_NK[:, :inputs]
        if index is not None and not in_group_order(index, -(-inputs // groups)):
            return by_index(values_NK, scale_NG, zero_NG, index)
        group_size(module, inputs, groups)
        return weights_of(values_NK, scale_NG, zero_NG, bits)

    def _index(self, tensors: RawTensors, module: str, inputs: int) -> Tensor | None:
        name = f"{module}.g_idx"
        if not tensors.has(name):
            return None
        return check_shape(name, tensors.raw(name), (inputs,))

    def _drop_empty_bias(self, tensors: RawTensors, module: str) -> None:
        """Early AutoGPTQ wrote a bias of zeros for every matrix."""
        name = f"{module}.bias"
        if tensors.has(name) and not torch.is_nonzero(tensors.peek(name).abs().max()):
            tensors.raw(name)
