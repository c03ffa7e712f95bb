"""Integer weights as the tensors of a compressed-tensors checkpoint, format `pack-quantized`.

The inverse of `compressed` for what our kernels hold. Scales are float32, or float16 where that is
the same, so that a checkpoint means the same weights to the bit.
"""

import torch
from torch import Tensor

from foretoken.kernels.group_numbers import in_few_bits
from foretoken.quant.weights import IntWeights, Scheme


def packed_tensors(module: str, weights: IntWeights) -> dict[str, Tensor]:
    """The tensors of a module [N, K].

    `weight_packed` int32 [N, K * bits / 32], `weight_scale` float32 or float16 [N, G],
    `weight_shape` int64 [2], and with zero points `weight_zero_point` int32 [N * bits / 32, G],
    rounded up.
    """
    bits, values_NK = weights.bits, weights.values_NK
    unsigned_NK = values_NK if bits == 4 else values_NK.view(torch.uint8) ^ 128
    # Scales of outputs stay float32, as kernels have them.
    scale_NG = weights.scale_NG.float()
    if weights.group:
        scale_NG = in_few_bits(scale_NG, None).scale
    tensors = {
        f"{module}.weight_packed": _packed(unsigned_NK, bits),
        f"{module}.weight_scale": scale_NG.contiguous(),
        f"{module}.weight_shape": torch.tensor(weights.shape, dtype=torch.int64),
    }
    if weights.zero_NG is not None:
        words_GX = _packed(weights.zero_NG.T.to(torch.uint8), bits)
        tensors[f"{module}.weight_zero_point"] = words_GX.T.contiguous()
    return tensors


def packed_config(scheme: Scheme, unquantized: list[str]) -> dict[str, object]:
    """The `quantization_config` of config.json.

    Args:
        scheme: of all linear layers.
        unquantized: names of those that stay floats.
    """
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": not scheme.asymmetric,
        "strategy": "group" if scheme.group else "channel",
        "group_size": scheme.group or None,
        "dynamic": False,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": unquantized,
        "kv_cache_scheme": None,
    }


def _packed(values_XY: Tensor, bits: int) -> Tensor:
    """uint8 [X, Y] in 32-bit words along Y, the first value lowest; zeros fill the last word."""
    per_word = 32 // bits
    missing = -values_XY.shape[1] % per_word
    filled = torch.nn.functional.pad(values_XY.to(torch.int64), (0, missing))
    shifts = torch.arange(per_word) * bits
    words = (filled.unflatten(1, (-1, per_word)) << shifts).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
