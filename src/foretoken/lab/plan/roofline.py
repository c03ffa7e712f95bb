"""How long a step takes at best: a roofline of the device, with the assumptions spelled out.

A step reads every active weight once and the keys and values of every running request once,
multiplies each row with the weights, and cannot be faster than its launches. Time is the larger of
reading and multiplying (Williams et al., 2009), plus the exchange between ranks. Nothing here is
measured; `foretoken lab fit` replaces it with a server's own step times.
"""

from dataclasses import dataclass

from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.devices import Device
from foretoken.lab.plan.memory_plan import kv_per_token
from foretoken.lab.plan.sizes import PlanModel

BANDWIDTH_SHARE = 0.80
"""Of the peak bandwidth, reached when reading weights: an assumption."""
COMPUTE_SHARE = 0.60
"""Of the peak throughput, reached by matrix products: an assumption."""
EAGER_STEP_S_PER_LAYER = 90e-6
"""Launch time per layer without captured graphs: an assumption."""
EXCHANGE_LATENCY_S = 10e-6
"""Of one all-reduce between ranks; there are two per layer: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """One model on one group of devices."""

    model: PlanModel
    quantization: Quantization
    kv_bytes: float
    """Of one element of keys and values."""
    device: Device
    bandwidth: float
    """Per device, bytes per second."""
    ranks: int
    eager: bool = False

    def seconds(self, requests: int, rows_each: int, context: float) -> float:
        """One step of `requests` sequences with `rows_each` new tokens and `context` old ones."""
        rows = requests * rows_each
        moved = self._weight_bytes(rows) + requests * context * kv_per_token(
            self.model, self.kv_bytes, max(1, round(context))
        )
        reading = moved / (self.bandwidth * BANDWIDTH_SHARE * self.ranks)
        speed = self.device.flops_for(self.quantization.compute) * COMPUTE_SHARE * self.ranks
        multiplying = rows * self.model.flops_per_token(context) / speed
        floor = EAGER_STEP_S_PER_LAYER if self.eager else self.device.step_s_per_layer
        return max(reading, multiplying, floor * self.model.num_layers) + self._exchange(rows)

    def _weight_bytes(self, rows: int) -> float:
        """Weights read for `rows` tokens: experts only as far as some token needs them."""
        model, per_weight = self.model, self.quantization.stored_bytes
        head = model.head_params * (per_weight if self.quantization.tables_too else 2.0)
        touched = 1.0 - (1.0 - model.expert_share) ** rows
        return head + (model.dense_params + touched * model.expert_params) * per_weight

    def _exchange(self, rows: int) -> float:
        """Two all-reduces per layer over the links of the ranks."""
        if self.ranks == 1:
            return 0.0
        volume = 2.0 * rows * self.model.hidden_size * 2
        link = self.device.link or 16e9
        return 2 * self.model.num_layers * (EXCHANGE_LATENCY_S + volume / link)
