"""What a target's steps cost where nothing was timed: a roofline with assumed numbers."""

import torch

from foretoken.config import ResolvedConfig
from foretoken.config.memory import ModelMemory
from foretoken.config.resolve import DTYPE_BYTES
from foretoken.control.cost import RooflineCost
from foretoken.runtime.runner import Runner

_CPU_BANDWIDTH, _CPU_FLOPS = 8e9, 4e10
"""Bytes and operations per second of one core: an assumption."""
_GPU_BANDWIDTH, _GPU_FLOPS = 1e12, 1e14
"""The same of a whole device: an assumption."""


def usual_machine(config: ResolvedConfig, runner: Runner) -> RooflineCost:
    """The roofline of the target on a machine as they usually are."""
    shape, size = runner.model.shape, DTYPE_BYTES[config.dtype]
    user, gpu = config.user, config.device.startswith("cuda")
    kept = ModelMemory(
        shape=shape, quantization=user.quantization, kv_cache_dtype=user.kv_cache_dtype
    )
    threads = torch.get_num_threads()
    return RooflineCost(
        weight_bytes=float(kept.weight_bytes(size)),
        kv_bytes=lambda _: float(kept.kv_per_token(size)),
        flops=lambda context: float(shape.flops_per_token(round(context))),
        bandwidth=_GPU_BANDWIDTH if gpu else threads * _CPU_BANDWIDTH,
        flops_per_s=_GPU_FLOPS if gpu else threads * _CPU_FLOPS,
        floor_s=1e-5 * shape.num_hidden_layers,
    )
