"""The roofline of a model on a group of devices: from the planner's tables to a model of step time.

Nothing here is measured, and every assumption is a constant of this file;
`foretoken.control.cost.RooflineCost` holds the formula. `foretoken lab fit` replaces it with a
server's own step times.
"""

from foretoken.control.cost import RooflineCost
from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.devices import Device
from foretoken.lab.plan.memory_plan import kv_per_token
from foretoken.lab.plan.sizes import PlanModel

BANDWIDTH_SHARE = 0.80
"""Share of the peak bandwidth that reading weights reaches: an assumption."""
COMPUTE_SHARE = 0.60
"""Share of the peak throughput that matrix products reach: an assumption."""
EAGER_STEP_S_PER_LAYER = 90e-6
"""Launch time per layer without captured graphs: an assumption."""
EXCHANGE_LATENCY_S = 10e-6
"""Latency of one all-reduce between ranks; there are two per layer: an assumption."""
_SLOW_LINK = 16e9
"""Bytes per second between devices without a link of their own: an assumption."""


def roofline(
    model: PlanModel,
    quantization: Quantization,
    device: Device,
    *,
    kv_bytes: float,
    ranks: int = 1,
    eager: bool = False,
) -> RooflineCost:
    """The bound on a step's time.

    Args:
        model: its sizes.
        quantization: of its weights.
        device: one of the group.
        kv_bytes: of one element of keys and values.
        ranks: devices that share the model.
        eager: whether it runs without captured graphs.
    """
    per_weight = quantization.stored_bytes
    head = model.head_params * (per_weight if quantization.tables_too else 2.0)
    floor = EAGER_STEP_S_PER_LAYER if eager else device.step_s_per_layer
    exchanges = 2 * model.num_layers if ranks > 1 else 0
    volume = 2.0 * model.hidden_size * 2
    return RooflineCost(
        weight_bytes=head + model.dense_params * per_weight,
        expert_bytes=model.expert_params * per_weight,
        expert_share=model.expert_share,
        kv_bytes=lambda context: kv_per_token(model, kv_bytes, max(1, round(context))),
        flops=model.flops_per_token,
        bandwidth=device.bandwidth * BANDWIDTH_SHARE * ranks,
        flops_per_s=device.flops_for(quantization.compute) * COMPUTE_SHARE * ranks,
        floor_s=floor * model.num_layers,
        exchange_s=exchanges * EXCHANGE_LATENCY_S,
        exchange_row_s=exchanges * volume / (device.link or _SLOW_LINK),
    )
