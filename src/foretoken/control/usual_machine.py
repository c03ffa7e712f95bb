"""What steps of a model take on a machine as they usually are, before anything is timed."""

from typing import Final

from foretoken.config.memory import ModelMemory
from foretoken.control.cost import RooflineCost

_CORE_BANDWIDTH, _CORE_FLOPS = 12e9, {16: 14e10, 8: 24e10}
"""Bytes per second of one core, and operations where activations have so many bits: between two
processors of 2022 and 2023, of which one does 8 operations per byte and one 14 to 17, with 8 bits
19 and 21 to 29 (benchmarks/LOG.md)."""
_GPU_BANDWIDTH, _GPU_FLOPS = 1e12, 1e14
"""The same of a whole device: an assumption."""
FLOPS_PER_BYTE: Final = {
    bits: round(flops / _CORE_BANDWIDTH) for bits, flops in _CORE_FLOPS.items()
}


def usual_machine(
    kept: ModelMemory, dtype_bytes: int, *, cores: int = 1, gpu: bool = False, x_bits: int = 16
) -> RooflineCost:
    """The roofline of a model.

    Args:
        kept: the model, as it is kept.
        dtype_bytes: of its type.
        cores: of a processor.
        gpu: whether it runs on a GPU instead.
        x_bits: of the activations that integer weights are multiplied with, 16 or 8.
    """
    shape = kept.shape

    def read_of_each(context: float) -> float:
        tokens = max(1, round(context))
        return shape.kv_read_bytes(tokens, dtype_bytes, kept.kv_cache_dtype) / tokens

    return RooflineCost(
        weight_bytes=float(kept.step_bytes(dtype_bytes, 0)),
        expert_bytes=float(kept.expert_bytes(dtype_bytes)),
        expert_share=shape.expert_share(1),
        experts=0 if shape.experts is None else shape.experts.count,
        kv_bytes=read_of_each,
        flops=lambda context: float(shape.flops_per_token(round(context))),
        bandwidth=_GPU_BANDWIDTH if gpu else cores * _CORE_BANDWIDTH,
        flops_per_s=_GPU_FLOPS if gpu else cores * _CORE_FLOPS[x_bits],
        side_by_side=gpu,
        floor_s=1e-5 * shape.num_hidden_layers,
    )
