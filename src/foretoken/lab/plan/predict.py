"""Predicted speed-up by load: the roofline's costs with the assumed acceptance.

What is assumed are ranges of alpha, the chance that a draft is accepted given that all before it
were, and for look-up methods the share of steps in which they find anything to draft, from the
table of methods. They are wide on purpose, travel with the prediction and are shown as assumptions;
`--acceptance` replaces them. Crossover is the number of requests in flight beyond which speculation
is slower than plain decoding.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.control.cost import CostModel, StepShape, speculative_step
from foretoken.errors import ConfigError
from foretoken.lab.plan.bits import QUANTIZATIONS
from foretoken.lab.plan.roofline import roofline
from foretoken.lab.plan.setup import Setup, planned_methods
from foretoken.lab.plan.sizes import PlanModel
from foretoken.lab.plan.speedup import MOST_K, best_k, break_even_rate

ONE_HOT_LOSS_PER_T = 0.25
"""Share of alpha lost at temperature 1 when drafts are greedy: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AssumedAcceptance:
    """What is assumed about the drafts of one method."""

    low: float
    high: float
    """Bounds of alpha."""
    hits: float
    """Share of steps with a draft."""
    source: str

    @property
    def middle(self) -> float:
        """Half way between the bounds."""
        return (self.low + self.high) / 2


def assume_acceptance(
    method: str, workload: str, temperature: float, given: str
) -> AssumedAcceptance:
    """The range for a method on a workload; `given` is LOW:HIGH, one number, or empty.

    Raises:
        ConfigError: `given` is not a range within 0 and 1.
    """
    plan = (planned_methods().get(method) or planned_methods()["draft_model"]).plan
    assert plan is not None, method
    hits = plan.hits.get(workload, 1.0)
    if given:
        low, high = _parse(given)
        return AssumedAcceptance(low=low, high=high, hits=hits, source="given")
    low, high = plan.acceptance[workload if workload in plan.acceptance else ""]
    kept = 1.0 - ONE_HOT_LOSS_PER_T * min(temperature, 1.0)
    return AssumedAcceptance(
        low=low * kept,
        high=high * kept,
        hits=hits,
        source=f"assumed for {workload} at temperature {temperature:g}, not measured",
    )


def _parse(given: str) -> tuple[float, float]:
    try:
        parts = [float(part) for part in given.split(":")]
    except ValueError:
        parts = []
    if len(parts) not in (1, 2) or not all(0 <= p <= 1 for p in parts) or parts[0] > parts[-1]:
        raise ConfigError("plan.acceptance", given, "LOW:HIGH within 0 and 1, such as 0.6:0.8")
    return parts[0], parts[-1]


LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
LOOKUP_COST = 0.01
"""Seconds of a look-up per draft, in plain steps: an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrediction:
    """At one number of requests in flight."""

    requests: int
    plain_step_s: float
    verify_cost: float
    """V: seconds of a verifying step over a plain one."""
    draft_cost: float
    """c: seconds per draft over a plain step."""
    break_even_rate: float
    """Accepted over drafted tokens at which speculation costs nothing and gains nothing."""
    low: float
    middle: float
    high: float
    """Speed-up at the lower bound, the middle and the upper bound of the acceptance."""
    best_k: int
    best: float
    """The k with the highest speed-up at the middle of the acceptance, and that speed-up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpeed:
    """One method over all loads."""

    method: str
    k: int
    acceptance: AssumedAcceptance
    loads: tuple[LoadPrediction, ...]
    crossover_low: float
    crossover: float
    crossover_high: float
    """Requests in flight at which the speed-up becomes 1, at the three acceptances; infinite:
    beyond the largest load; 0: it never pays."""
    crossover_qps: float
    """Requests per second at `crossover`, from Little's law."""

    def at(self, requests: int) -> LoadPrediction:
        """The prediction at the load nearest to `requests`."""
        return min(self.loads, key=lambda load: abs(math.log(load.requests / requests)))


def predict(setup: Setup) -> PlannedSpeed:
    """The speed-up of the method of `setup` by load."""
    settings = setup.settings
    own = assume_acceptance(
        setup.method, settings.workload, settings.temperature, settings.acceptance
    )
    target, drafter = step_models(setup)
    context = settings.context - settings.output_tokens / 2
    loads = tuple(
        _at_load(setup, own, (target, drafter), requests, max(1.0, context)) for requests in LOADS
    )
    crossings = [_crossing([getattr(load, name) for load in loads]) for name in _BOUNDS]
    return PlannedSpeed(
        method=setup.method,
        k=setup.k,
        acceptance=own,
        loads=loads,
        crossover_low=crossings[0],
        crossover=crossings[1],
        crossover_high=crossings[2],
        crossover_qps=_arrivals(setup, target, crossings[1]),
    )


_BOUNDS = ("low", "middle", "high")


def step_models(setup: Setup) -> tuple[CostModel, CostModel | None]:
    """Step times of the target, and of whatever drafts (None: a look-up)."""
    bandwidth = setup.settings.bandwidth_gb_s * 1e9 or setup.device.bandwidth
    device = replace(setup.device, bandwidth=bandwidth)
    bound = partial(roofline, device=device, kv_bytes=setup.kv_bytes)
    target = bound(setup.target, setup.quantization, ranks=setup.tp)
    drafting = setup.drafting
    if setup.drafts_with == "model" and setup.draft is not None:
        drafter = roofline(
            setup.draft,
            setup.draft_quantization,
            device,
            kv_bytes=setup.draft_kv_bytes,
            ranks=setup.draft_tp,
            eager=setup.settings.eager_draft,
        )
        return target, drafter
    if drafting is not None and drafting.drafts_with == "head":
        quantization = QUANTIZATIONS["bf16"] if drafting.own_file else setup.quantization
        return target, bound(_one_layer(setup.target), quantization, ranks=setup.tp)
    return target, None


def _one_layer(model: PlanModel) -> PlanModel:
    """A head as deep as one layer of the target; it uses the target's output head."""
    layers = model.num_layers
    return replace(
        model,
        num_layers=1,
        dense_params=model.dense_params // layers,
        expert_params=model.expert_params // layers,
        kv_elements=(model.kv_elements + model.window_elements) // layers,
        window_elements=0,
        full_layers=1,
        window_layers=0,
    )


def _at_load(
    setup: Setup,
    acceptance: AssumedAcceptance,
    steps: tuple[CostModel, CostModel | None],
    requests: int,
    context: float,
) -> LoadPrediction:
    target, drafter = steps

    def seconds(model: CostModel, rows_each: int) -> float:
        shape = StepShape(requests * rows_each, sequences=requests, context=context)
        return model.seconds(shape).seconds

    plain = seconds(target, 1)
    costs = [1.0] + [seconds(target, k + 1) / plain for k in range(1, MOST_K + 1)]
    draft = seconds(drafter, 1) / plain if drafter else LOOKUP_COST
    k, hits = setup.k, acceptance.hits
    verify = costs[k] if k < len(costs) else seconds(target, k + 1) / plain

    def gain(alpha: float) -> float:
        tokens = 1.0 + hits * (ConstantAcceptance(alpha).length(k) - 1.0)
        return tokens / (1.0 + hits * (speculative_step(verify, draft, k) - 1.0))

    found, best = best_k(acceptance.middle, costs, draft)
    return LoadPrediction(
        requests=requests,
        plain_step_s=plain,
        verify_cost=verify,
        draft_cost=draft,
        break_even_rate=break_even_rate(verify, draft, k),
        low=gain(acceptance.low),
        middle=gain(acceptance.middle),
        high=gain(acceptance.high),
        best_k=found,
        best=1.0 + hits * (best - 1.0),
    )


def _crossing(gains: Sequence[float]) -> float:
    """Requests in flight at which `gains` fall to 1, between the loads on a logarithmic scale."""
    if gains[0] <= 1.0:
        return 0.0
    for i in range(1, len(gains)):
        if gains[i] <= 1.0:
            share = (gains[i - 1] - 1.0) / (gains[i - 1] - gains[i])
            return float(LOADS[i - 1] * (LOADS[i] / LOADS[i - 1]) ** share)
    return math.inf


def _arrivals(setup: Setup, target: CostModel, requests: float) -> float:
    """Requests per second that keep `requests` in flight while decoding plainly."""
    if requests == 0.0 or math.isinf(requests):
        return requests
    settings = setup.settings
    running, prompt = max(1, round(requests)), max(1, settings.context - settings.output_tokens)
    step = target.seconds(StepShape(running, sequences=running, context=settings.context))
    prefill = target.seconds(StepShape(prompt, context=prompt / 2))
    return requests / (settings.output_tokens * step.seconds + prefill.seconds)
