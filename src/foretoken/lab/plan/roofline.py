"""The roofline of a model on a group of devices: from the planner's tables to a model of step time.

Nothing here is measured, and every assumption is a constant of this file;
`foretoken.control.cost.RooflineCost` holds the formula. `lab decide --fit` replaces it with a
server's own step times.
"""

from dataclasses import dataclass, field

from foretoken.control.cost import RooflineCost
from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.devices import Device
from foretoken.lab.plan.memory_plan import kv_per_token
from foretoken.lab.plan.priors.engine_costs import EngineCost
from foretoken.lab.plan.sizes import PlanModel

BANDWIDTH_SHARE = 0.80
"""Share of the peak bandwidth that reading weights reaches: an assumption."""
COMPUTE_SHARE = 0.60
"""Share of the peak throughput that matrix products reach: an assumption."""
MOE_LAYER_S = 60e-6
"""Time per layer of a mixture below which a step does not go, for routing and many small products:
from published paces without drafts, 2.5 to 3.1 ms for 36 to 48 layers."""
EAGER_STEP_S_PER_LAYER = 90e-6
"""Launch time per layer without captured graphs: an assumption."""
WIDE = 2.0
"""Bytes per weight from which on nothing is unpacked."""
_SLOW_LINK = 16e9
"""Bytes per second between devices without a link of their own: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model runs, and how."""

    device: Device
    """One of the group."""
    ranks: int = 1
    """Processes that share the model."""
    devices: float = 1.0
    """Those that they run on; a part of one for a process that has a part of its cores."""
    kv_bytes: float = 2.0
    """Bytes of one element of keys and values."""
    host: EngineCost = field(default_factory=EngineCost)
    """What the engine adds."""
    drafts: bool = False
    """Whether the model is a drafter."""
    eager: bool = False
    """Whether it runs without captured graphs."""


def roofline(model: PlanModel, quantization: Quantization, place: Placement) -> RooflineCost:
    """The bound on the time of a step of `model`, whose weights are quantized so, at a place."""
    per_weight, host = quantization.stored_bytes, place.host
    head = model.head_params * (per_weight if quantization.tables_too else 2.0)
    layer_s = host.layer_s or place.device.step_s_per_layer
    floor = max(
        layer_s,
        EAGER_STEP_S_PER_LAYER if place.eager else 0.0,
        MOE_LAYER_S if model.num_experts and place.device.kind == "gpu" else 0.0,
    )
    exchanges = host.exchanges * model.num_layers if place.ranks > 1 else 0
    volume = 2.0 * model.hidden_size * 2
    return RooflineCost(
        weight_bytes=head + model.dense_params * per_weight,
        expert_bytes=model.expert_params * per_weight,
        expert_share=model.expert_share,
        kv_bytes=lambda context: kv_per_token(model, place.kv_bytes, max(1, round(context))),
        flops=model.flops_per_token,
        bandwidth=place.device.bandwidth * BANDWIDTH_SHARE * place.devices,
        flops_per_s=place.device.flops_for(quantization.compute) * COMPUTE_SHARE * place.devices,
        floor_s=floor * model.num_layers,
        exchange_s=exchanges * host.exchange_s + (host.draft_s if place.drafts else host.step_s),
        exchange_row_s=exchanges * volume / (place.device.link or _SLOW_LINK),
        reread_share=host.reread_share if per_weight < WIDE else 0.0,
    )
