"""Predicted speed-up, times and drafts by load, of every way of drafting: the roofline's costs with
the assumed acceptance, whose ranges travel with the prediction and are shown with it.

Nothing here is measured, and every assumption of the roofline is a constant of this file;
`foretoken.control.cost.RooflineCost` holds the formula. `lab decide --fit` says a server's own
times. k: drafts per verification. V: seconds of a verifying step over a plain one at the same
batch. c: seconds of a draft step over a plain one. Of times: waiting for a free place is not in
them.

Engines take a schedule that may only fall as the load rises. A mixture of experts can want the
opposite: few rows touch many experts anew, many rows share them. So can a small target whose
drafter is bound by launches. Such a list is said as advice, and the number of the load that
decides is used throughout, as with an engine that takes one number. Foretoken finds its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from foretoken.config.method_registry import DraftingMethod
from foretoken.control.cost import CostModel, RooflineCost, StepShape, speculative_step
from foretoken.lab.launch.engines import refusal
from foretoken.lab.plan.acceptance import (
    EIGHTY,
    AcceptancePrior,
    AssumedAcceptance,
    assume_acceptance,
)
from foretoken.lab.plan.memory_plan import kv_per_token
from foretoken.lab.plan.method_plans import plan_of, planned_methods
from foretoken.lab.plan.setup import MOST_K, Setup
from foretoken.lab.plan.sizes import PlanModel, Quantization, head_of, stage_of

BANDWIDTH_SHARE = 0.80
"""Share of the peak bandwidth that reading weights reaches: an assumption."""
COMPUTE_SHARE = 0.60
"""Share of the peak throughput that matrix products reach: an assumption."""
MOE_LAYER_S = 60e-6
"""Time per layer of a mixture below which a step does not go, for routing and many small products:
from published paces without drafts, 2.5 to 3.1 ms for 36 to 48 layers."""
WIDE = 2.0
"""Bytes per weight from which on nothing is unpacked."""
_SLOW_LINK = 16e9
"""Bytes per second between devices without a link of their own: an assumption."""


def roofline(
    setup: Setup, model: PlanModel, stored: Quantization, ranks: int, kv_bytes: float, host_s: float
) -> RooflineCost:
    """The bound on the time of a step of `model` over so many ranks of `setup`, of which one that
    has a part of a device's cores has that part of its speed; `kv_bytes` are those of one element
    of its keys and values, `host_s` seconds of the engine around each pass."""
    per_weight, host, device = stored.stored_bytes, setup.host, setup.device
    head = model.head_params * (per_weight if stored.tables_too else 2.0)
    experts = model.num_experts and device.kind == "gpu"
    floor = max(host.layer_s or device.step_s_per_layer, MOE_LAYER_S if experts else 0.0)
    exchanges = host.exchanges * model.shape.num_hidden_layers if ranks > 1 else 0
    volume = 2.0 * model.shape.hidden_size * 2
    devices = setup.devices * ranks / setup.tp
    bandwidth = setup.settings.bandwidth_gb_s * 1e9 or device.bandwidth
    return RooflineCost(
        weight_bytes=head + model.dense_params * stored.dense_bytes(model),
        expert_bytes=model.expert_params * per_weight,
        expert_share=model.expert_share,
        kv_bytes=lambda context: kv_per_token(model, kv_bytes, max(1, round(context))),
        flops=model.flops_per_token,
        bandwidth=bandwidth * BANDWIDTH_SHARE * devices,
        flops_per_s=device.flops_for(stored.compute) * COMPUTE_SHARE * devices,
        side_by_side=device.kind != "cpu",
        floor_s=floor * model.shape.num_hidden_layers,
        exchange_s=exchanges * host.exchange_s + host_s,
        exchange_row_s=exchanges * volume / (device.link or _SLOW_LINK),
        reread_share=host.reread_share if per_weight < WIDE else 0.0,
    )


LOADS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Requests in flight that are looked at beside the usual number and the peak."""
COST_SPREAD = 0.15
"""Standard deviation of the logarithm of what steps cost, around what the roofline says."""
LOOKUP_COST = 0.01
"""Seconds of a look-up in plain steps: an assumption. It is one search however long the draft is,
and is paid in the steps that find none too."""


@dataclass(frozen=True, slots=True)
class GainRange:
    """A predicted speed-up with the ends of an interval that should hold 80 of 100 cases."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPrediction:
    """At one number of requests in flight."""

    requests: int
    plain_step_s: float
    verify_cost: float
    draft_cost: float
    break_even_rate: float
    """Accepted over drafted tokens at which speculation costs nothing and gains nothing: what
    look-ups that find nothing cost has to be won back by those that do."""
    low: float
    middle: float
    high: float
    """Speed-up, and the ends of its interval."""
    best_k: int
    best_low: float
    best: float
    best_high: float
    """The k with the highest speed-up at the middle of the acceptance, and its speed-up with
    the ends of its interval; 0 and 1 where no k pays."""
    costs: tuple[float, ...]
    """Seconds of a step of k drafts over a plain one, by k from 0 to MOST_K, or to what was asked
    for; the mean of the steps that find a draft and of those that find none."""
    gains: tuple[GainRange, ...]

    def gain(self, k: int) -> GainRange:
        return self.gains[min(k, len(self.gains) - 1)]

    def cost(self, k: int) -> float:
        """What a step of k drafts costs on average, in plain ones."""
        return self.costs[min(k, len(self.costs) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpeed:
    """One method over all loads."""

    method: str
    k: int
    acceptance: AssumedAcceptance
    loads: tuple[LoadPrediction, ...]

    def at(self, requests: int) -> LoadPrediction:
        return min(self.loads, key=lambda load: abs(math.log(load.requests / requests)))

    def rates(self, requests: int, k: int) -> tuple[float, float]:
        """Accepted over drafted tokens with k drafts at the load nearest to `requests`: what is
        expected, and what breaks even."""
        own = self.acceptance
        expected = (own.length(own.middle, k) - 1.0) / (own.hits * k) if k else 0.0
        return min(1.0, expected), _break_even(own, self.at(requests).cost(k), k)


def predict(
    setup: Setup, prior: AcceptancePrior | None = None, *, loads: Sequence[int] = ()
) -> PlannedSpeed:
    """The speed-up of the method of `setup` by load, at `loads` too; `prior` as in
    `assume_acceptance`."""
    own, steps = assume_acceptance(setup, prior), StepCosts(setup)
    asked = sorted({*LOADS, setup.usual, setup.peak, *loads})
    found = tuple(_at_load(setup.k, own, steps, requests) for requests in asked)
    return PlannedSpeed(method=setup.method, k=setup.k, acceptance=own, loads=found)


class StepCosts:
    """What steps cost on a setup while a typical request is decoded, in plain steps of the same
    load."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._target, self._drafter = step_models(setup)
        settings = setup.settings
        self._context = max(1.0, settings.context - settings.output_tokens / 2)
        self._known: dict[tuple[bool, int, int], float] = {}
        """Seconds by model, rows and requests: each length of draft asks for the plain step."""

    def plain_s(self, requests: int) -> float:
        return self._seconds(self._target, requests, requests)

    def verify(self, requests: int, rows_each: int) -> float:
        """V: a step over so many rows per request."""
        return self._seconds(self._target, requests * rows_each, requests) / self.plain_s(requests)

    def draft(self, requests: int, k: int) -> float:
        """c: one of k drafts for every request, as a mean over all steps."""
        if self._drafter is None:
            return LOOKUP_COST / max(1, k)
        rows = max(1, k) if self.setup.drafts_in_one_pass else 1
        pass_s = self._seconds(self._drafter, requests * rows, requests)
        return pass_s / rows / self.plain_s(requests)

    def _seconds(self, model: CostModel, rows: int, requests: int) -> float:
        key = model is self._target, rows, requests
        if key not in self._known:
            shape = StepShape(rows, sequences=requests, context=self._context)
            self._known[key] = model.seconds(shape)
        return self._known[key]


def step_models(setup: Setup) -> tuple[CostModel, CostModel | None]:
    """Step times of the target, and of whatever drafts (None: a look-up)."""
    drafting, host = setup.drafting, setup.host
    target = roofline(
        setup, setup.target, setup.quantization, setup.tp, setup.kv_bytes, host.step_s
    )
    if (draft := setup.draft_model) is not None:
        bits, kv_bytes = setup.draft_quantization, setup.draft_kv_bytes
        return target, roofline(setup, draft, bits, setup.draft_tp, kv_bytes, host.draft_s)
    if drafting is None or drafting.drafts_with != "head":
        return target, None
    head = (head_of if drafting.own_kv else stage_of)(setup.target, drafting)
    ranks = 1 if setup.settings.engine == "foretoken" else setup.tp
    bits = setup.head_quantization
    return target, roofline(setup, head, bits, ranks, setup.kv_bytes, host.draft_s)


def mean_cost(own: AssumedAcceptance, verify: float, draft: float, k: int) -> float:
    """Seconds of a step over a plain one: V where there is a draft to verify, 1 where none was
    found, and the drafting in all of them."""
    return speculative_step(1.0 + own.hits * (verify - 1.0), draft, k)


def gain_range(own: AssumedAcceptance, k: int, cost: float) -> GainRange:
    """The speed-up of k drafts whose steps cost `cost` plain ones on average, with what is not
    known of the acceptance and of the cost."""
    if k == 0:
        return GainRange(1.0, 1.0, 1.0)
    low, middle, high = (own.length(alpha, k) / cost for alpha in (own.low, own.middle, own.high))
    doubt = EIGHTY * COST_SPREAD * own.hits
    return GainRange(
        middle * math.exp(-math.hypot(math.log(middle / low), doubt)),
        middle,
        min(k + 1.0, middle * math.exp(math.hypot(math.log(high / middle), doubt))),
    )


def _break_even(own: AssumedAcceptance, cost: float, k: int) -> float:
    """Accepted over drafted tokens at which a step of such a mean cost gains nothing."""
    return max(0.0, cost - 1.0) / (own.hits * k) if k and own.hits else 0.0


def best_k(gain: Callable[[int], float], bound: int = MOST_K) -> int:
    """The k from 1 to `bound` that gains most, of equals within 1 % the smaller; 0: none pays."""
    gains = [gain(k) for k in range(1, bound + 1)]
    most = max(gains)
    if most <= 1.0:
        return 0
    return next(k for k, found in enumerate(gains, start=1) if found > 1.0 and 1.01 * found >= most)


def _at_load(k: int, own: AssumedAcceptance, steps: StepCosts, requests: int) -> LoadPrediction:
    ks, setup = range(max(k, MOST_K) + 1), steps.setup
    draft = [steps.draft(requests, n) for n in ks]
    verify = [steps.verify(requests, n + 1) if n else 1.0 for n in ks]
    costs = tuple(mean_cost(own, verify[n], draft[n], n) for n in ks)
    best = best_k(lambda n: own.length(own.middle, n) / costs[n], setup.max_drafts)
    gains = tuple(gain_range(own, n, costs[n]) for n in ks)
    return LoadPrediction(
        requests=requests,
        plain_step_s=steps.plain_s(requests),
        verify_cost=verify[k],
        draft_cost=draft[k],
        break_even_rate=_break_even(own, costs[k], k),
        low=gains[k].low,
        middle=gains[k].middle,
        high=gains[k].high,
        best_k=best,
        best_low=gains[best].low,
        best=gains[best].middle,
        best_high=gains[best].high,
        costs=costs,
        gains=gains,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLatency:
    """Seconds at one load."""

    requests: int
    k: int
    """Drafts per verification with speculation; 0: none at this load."""
    ttft_plain_s: float
    ttft_s: float
    tpot_plain_s: float
    tpot_s: float
    end_to_end_plain_s: float
    end_to_end_s: float
    end_to_end_slow_s: float

    @property
    def end_to_end_gain(self) -> float:
        return self.end_to_end_plain_s / self.end_to_end_s

    @property
    def end_to_end_low(self) -> float:
        return self.end_to_end_plain_s / self.end_to_end_slow_s


def latency(setup: Setup, load: LoadPrediction, k: int) -> PlannedLatency:
    """What a typical request of `setup` waits for at a load, with k drafts or, if 0, none."""
    settings, drafting = setup.settings, setup.drafting
    prompt = max(1, settings.context - settings.output_tokens)
    target, drafter = step_models(setup)
    shape = StepShape(prompt, context=prompt / 2, prompt_rows=prompt)
    read_s = target.seconds(shape)
    # A request that comes while others are decoded waits for half a step of theirs on average.
    wait_s = load.plain_step_s / 2 if load.requests > 1 else 0.0
    plain_s, tpot_plain_s = read_s + wait_s, load.plain_step_s
    first_s, tpot_s, slow_s = plain_s, tpot_plain_s, tpot_plain_s
    if k:
        # A drafter that keeps keys and values reads the prompt too, but for heads of whole blocks,
        # which make theirs of the target's states directly.
        reads = drafting is not None and drafting.own_kv and not drafting.in_one_pass
        own_s = drafter.seconds(shape) if drafter is not None and reads else 0.0
        gain = load.gain(k)
        first_s = read_s + own_s + wait_s * load.cost(k)
        tpot_s, slow_s = tpot_plain_s / gain.middle, tpot_plain_s / gain.low
    more = settings.output_tokens - 1
    return PlannedLatency(
        requests=load.requests,
        k=k,
        ttft_plain_s=plain_s,
        ttft_s=first_s,
        tpot_plain_s=tpot_plain_s,
        tpot_s=tpot_s,
        end_to_end_plain_s=plain_s + more * tpot_plain_s,
        end_to_end_s=first_s + more * tpot_s,
        end_to_end_slow_s=first_s + more * slow_s,
    )


def show_seconds(seconds: float) -> str:
    """`1.25 s`, `43.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSchedule:
    steps: tuple[tuple[int, int], ...]
    """(k, last number of requests in flight) by rising load; the last entry has no end (0)."""
    decided: int
    """At the load that decides the verdict, 0: off there; engines without a list have it always."""
    follows: bool
    """Whether the engine that was asked for can be told the steps, or finds them by itself."""

    @property
    def falls(self) -> bool:
        """Whether more load never wants more drafts, so that an engine can be told."""
        ks = [k for k, _ in self.steps]
        return ks == sorted(ks, reverse=True)

    def listed(self, engine: str, method: DraftingMethod) -> bool:
        """Whether the command of an engine has the steps. A length of its own, such as a depth of
        suffixes, has no list."""
        return engine == "vllm" and self.falls and method.default_drafts_key is None

    def at(self, requests: int) -> int:
        return next(k for k, last in self.steps if last == 0 or requests <= last)

    def told(self, requests: int) -> int:
        """k of the emitted command with so many requests in flight."""
        return self.at(requests) if self.follows else self.decided

    @property
    def words(self) -> str:
        parts, first = [], 1
        for k, last in self.steps:
            where = f" at {first} and more" if first > 1 else " throughout"
            if last:
                where = f" at {first} to {last}" if last > first else f" at {first}"
            parts.append((f"k = {k}" if k else "off") + where)
            first = last + 1
        return ", ".join(parts)


def chosen_k(setup: Setup, load: LoadPrediction) -> int:
    """k at one load: the best, or the one that was asked for while it gains anything."""
    if setup.method == "none":
        return 0
    if setup.settings.num_speculative_tokens:
        return setup.k if load.middle > 1.0 else 0
    return load.best_k


def draft_schedule(setup: Setup, prediction: PlannedSpeed) -> DraftSchedule:
    steps: list[tuple[int, int]] = []
    for load in prediction.loads:
        k = chosen_k(setup, load)
        if steps and steps[-1][0] == k:
            steps.pop()
        steps.append((k, load.requests))
    steps[-1] = (steps[-1][0], 0)
    decided = chosen_k(setup, prediction.at(setup.deciding))
    found = DraftSchedule(steps=tuple(steps), decided=decided, follows=True)
    engine, drafting = setup.settings.engine, setup.drafting
    if len(steps) == 1 or drafting is None or engine == "foretoken":
        return found
    return replace(found, follows=found.listed(engine, drafting))


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodOutlook:
    method: str
    available: bool
    refused: str
    """Why the engine does not draft so; empty if it does."""
    needs: str
    prediction: PlannedSpeed


def method_outlooks(setup: Setup) -> tuple[MethodOutlook, ...]:
    """Every method that makes sense for this target, the asked one with its own k."""
    found = []
    for method, own in _ways(setup):
        refused, plan = refusal(setup.settings.engine, method), plan_of(method)
        found.append(
            MethodOutlook(
                method=method.name,
                available=not (refused or (method.drafts_with == "head" and plan.own_file)),
                refused=refused,
                needs=plan.needs,
                prediction=predict(own),
            )
        )
    return tuple(found)


def with_method(setup: Setup, method: DraftingMethod) -> Setup:
    """The same models with another method, of which no acceptance was given."""
    settings, k = replace(setup.settings, acceptance="", rate=""), plan_of(method).usual_drafts
    return replace(setup, method=method.name, k=k, settings=settings)


def _ways(setup: Setup) -> Iterator[tuple[DraftingMethod, Setup]]:
    """Every method that makes sense, look-ups first, and the setup with it in place of the asked
    one."""
    order = ("text", "head", "model")
    for method in sorted(
        planned_methods().values(),
        key=lambda method: (not plan_of(method).own_file, order.index(method.drafts_with)),
    ):
        there = plan_of(method).own_file or setup.target.mtp_layers > 0
        if there and (method.drafts_with != "model" or setup.draft is not None):
            asked = method.name == setup.method
            yield method, setup if asked else with_method(setup, method)
