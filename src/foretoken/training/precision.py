"""Which number type the products of training are fast in.

Owns the question whether a device multiplies bfloat16. It knows no model and no optimizer.
"""

from functools import cache

import torch

from foretoken.hardware import Hardware


@cache
def _cpu_multiplies_bfloat16() -> bool:
    return Hardware.detect().has_bf16


def product_type(device: torch.device) -> torch.dtype:
    """bfloat16 where the device multiplies it, else float32: a processor without takes a dozen
    times as long for it."""
    narrow = device.type != "cpu" or _cpu_multiplies_bfloat16()
    return torch.bfloat16 if narrow else torch.float32


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Products in bfloat16 with float32 weights for precision `bfloat16`, and for `auto` where the
    device multiplies them."""
    narrow = precision == "bfloat16"
    if precision == "auto":
        narrow = product_type(device) == torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=narrow)
