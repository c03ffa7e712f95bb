"""Predicted speed-up, times and drafts by load: the roofline's costs with the assumed acceptance.

The ranges of acceptance are those of `foretoken.lab.plan.acceptance`; they travel with the
prediction and are shown with it. Of each load stand the gain with one and the same number of
drafts, and the number that gains most there. Crossover is the number of requests in flight beyond
which speculation is slower than plain decoding.


Nothing here is measured, and every assumption of the roofline is a constant of this file;
`foretoken.control.cost.RooflineCost` holds the formula. `lab decide --fit` replaces it with a
server's own step times. Of times: waiting for a free place is not in them; where more requests are
in flight than fit, the rest queues before.

Engines take a schedule that may only fall as the load rises. A mixture of experts can want the
opposite: few rows touch many experts anew, many rows share them. So can a small target whose
drafter is bound by launches. Such a list is said as advice, and the number of the load that
decides is used throughout, as with an engine that takes one number. Foretoken finds its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from foretoken.control.cost import CostModel, RooflineCost, StepShape, speculative_step
from foretoken.lab.plan.acceptance import (
    EIGHTY,
    AcceptancePrior,
    AssumedAcceptance,
    assume_acceptance,
)
from foretoken.lab.plan.bits import Quantization
from foretoken.lab.plan.devices import Device, EngineCost
from foretoken.lab.plan.memory_plan import kv_per_token
from foretoken.lab.plan.setup import Setup
from foretoken.lab.plan.sizes import PlanModel, head_of, stage_of
from foretoken.lab.plan.speedup import MOST_K, MeasuredCost, best_k, next_step

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
    ranks: int = 1
    devices: float = 1.0
    """Those that they run on; a part of one for a process that has a part of its cores."""
    kv_bytes: float = 2.0
    host: EngineCost = field(default_factory=EngineCost)
    drafts: bool = False
    eager: bool = False


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
    """Seconds of a step of k drafts over a plain one, by k from 0 to MOST_K; the mean of the steps
    that find a draft and of those that find none."""
    gains: tuple[GainRange, ...]

    def gain(self, k: int) -> GainRange:
        """The speed-up of k drafts, at most MOST_K."""
        return self.gains[min(k, MOST_K)]

    def cost(self, k: int) -> float:
        """What a step of k drafts costs on average, in plain ones; k at most MOST_K."""
        return self.costs[min(k, MOST_K)]


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
    """Requests in flight at which the speed-up becomes 1, for the speed-up and its two ends;
    infinite: beyond the largest load; 0: it never pays."""
    crossover_qps: float
    """Requests per second at `crossover`, from Little's law."""

    def at(self, requests: int) -> LoadPrediction:
        """The prediction at the load nearest to `requests`."""
        return min(self.loads, key=lambda load: abs(math.log(load.requests / requests)))

    def rates(self, requests: int, k: int) -> tuple[float, float]:
        """Accepted over drafted tokens with k drafts, at most MOST_K, at the load nearest to
        `requests`: what is expected, and what breaks even."""
        own = self.acceptance
        expected = (own.length(own.middle, k) - 1.0) / (own.hits * k) if k else 0.0
        return min(1.0, expected), _break_even(own, self.at(requests).cost(k), k)


def predict(
    setup: Setup, prior: AcceptancePrior | None = None, *, loads: Sequence[int] = ()
) -> PlannedSpeed:
    """The speed-up of the method of `setup` by load, at `loads` too; `prior` as in
    `assume_acceptance`."""
    own = assume_acceptance(setup, prior)
    steps = step_costs(setup)
    asked = sorted({*LOADS, setup.usual, setup.peak, *loads})
    found = tuple(_at_load(setup.k, own, steps, requests) for requests in asked)
    crossings = [_crossing(asked, [getattr(load, name) for load in found]) for name in _BOUNDS]
    return PlannedSpeed(
        method=setup.method,
        k=setup.k,
        acceptance=own,
        loads=found,
        crossover_low=crossings[0],
        crossover=crossings[1],
        crossover_high=crossings[2],
        crossover_qps=_arrivals(setup, steps.target, crossings[1]),
    )


def predict_at(setup: Setup, requests: int) -> LoadPrediction:
    """The speed-up of the method of `setup` at one load, as `predict` has it."""
    return _at_load(setup.k, assume_acceptance(setup), step_costs(setup), requests)


_BOUNDS = ("low", "middle", "high")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What steps cost on a setup, in plain steps of the same load."""

    target: CostModel
    drafter: CostModel | None
    context: float
    """Tokens that a request has on average while it is decoded."""
    in_one_pass: bool = False
    most_drafts: int = MOST_K
    measured: MeasuredCost | None = None
    """What steps cost at the load `measured_at`; elsewhere as much more or less as is modelled."""
    own: bool = False
    """Whether the drafting was measured too, and not that of another method."""
    measured_at: int = 1
    _known: dict[tuple[bool, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Seconds by model, rows and requests: each length of draft asks for the plain step again."""

    def plain_s(self, requests: int) -> float:
        """Seconds of a step without drafts."""
        return self._seconds(self.target, requests, requests)

    def verify(self, requests: int, rows_each: int) -> float:
        """V: a step over so many rows per request."""
        modelled = self._verify(requests, rows_each)
        if self.measured is None:
            return modelled
        here = self._verify(self.measured_at, rows_each)
        return max(1.0, self.measured.verify(rows_each) + modelled - here)

    def draft(self, requests: int, k: int) -> float:
        """c: one of k drafts for every request, as a mean over all steps."""
        modelled = self._draft(requests, k)
        if self.measured is None or not self.own:
            return modelled
        own = self.measured.draft_share * self.measured.draft_cost
        return max(0.0, own + modelled - self._draft(self.measured_at, k))

    def measured_here(self, requests: int) -> MeasuredCost | None:
        """What was measured of the method at this load."""
        return self.measured if self.own and requests == self.measured_at else None

    def _verify(self, requests: int, rows_each: int) -> float:
        return self._seconds(self.target, requests * rows_each, requests) / self.plain_s(requests)

    def _draft(self, requests: int, k: int) -> float:
        if self.drafter is None:
            return LOOKUP_COST / max(1, k)
        rows = max(1, k) if self.in_one_pass else 1
        pass_s = self._seconds(self.drafter, requests * rows, requests)
        return pass_s / rows / self.plain_s(requests)

    def _seconds(self, model: CostModel, rows: int, requests: int) -> float:
        key = model is self.target, rows, requests
        if key not in self._known:
            shape = StepShape(rows, sequences=requests, context=self.context)
            self._known[key] = model.seconds(shape).seconds
        return self._known[key]


def step_costs(setup: Setup) -> StepCosts:
    """What steps of this setup cost while a typical request is decoded."""
    settings = setup.settings
    target, drafter = step_models(setup)
    return StepCosts(
        target=target,
        drafter=drafter,
        context=max(1.0, settings.context - settings.output_tokens / 2),
        in_one_pass=setup.drafts_in_one_pass,
        most_drafts=setup.most_drafts,
        measured=setup.measured,
        own=setup.own_measured is not None,
        measured_at=setup.deciding,
    )


def step_models(setup: Setup) -> tuple[CostModel, CostModel | None]:
    """Step times of the target, and of whatever drafts (None: a look-up)."""
    bandwidth = setup.settings.bandwidth_gb_s * 1e9 or setup.device.bandwidth
    device = replace(setup.device, bandwidth=bandwidth)
    place = Placement(
        device=device, ranks=setup.tp, devices=setup.devices, kv_bytes=setup.kv_bytes,
        host=setup.host,
    )  # fmt: skip
    target = roofline(setup.target, setup.quantization, place)
    drafting = setup.drafting
    part = setup.devices / setup.tp
    if setup.drafts_with == "model" and setup.draft is not None:
        place = replace(
            place, ranks=setup.draft_tp, devices=part * setup.draft_tp, drafts=True,
            kv_bytes=setup.draft_kv_bytes,
            eager=setup.settings.eager_draft,
        )  # fmt: skip
        return target, roofline(setup.draft, setup.draft_quantization, place)
    if drafting is not None and drafting.drafts_with == "head":
        head = (head_of if drafting.own_kv else stage_of)(setup.target, drafting)
        if setup.settings.engine == "foretoken":
            place = replace(place, ranks=1, devices=part)
        return target, roofline(head, setup.head_quantization, replace(place, drafts=True))
    return target, None


def mean_cost(own: AssumedAcceptance, verify: float, draft: float, k: int) -> float:
    """Seconds of a step over a plain one: V where there is a draft to verify, 1 where none was
    found, and the drafting in all of them."""
    return speculative_step(1.0 + own.hits * (verify - 1.0), draft, k)


def gain_range(
    own: AssumedAcceptance, k: int, cost: float, spread: float = COST_SPREAD
) -> GainRange:
    """The speed-up of k drafts whose steps cost `cost` plain ones on average, with what is not
    known of the acceptance and, by `spread`, of the cost."""
    if k == 0:
        return GainRange(1.0, 1.0, 1.0)
    low, middle, high = (own.length(alpha, k) / cost for alpha in (own.low, own.middle, own.high))
    doubt = EIGHTY * spread * own.hits
    return GainRange(
        middle * math.exp(-math.hypot(math.log(middle / low), doubt)),
        middle,
        min(k + 1.0, middle * math.exp(math.hypot(math.log(high / middle), doubt))),
    )


def _break_even(own: AssumedAcceptance, cost: float, k: int) -> float:
    """Accepted over drafted tokens at which a step of such a mean cost gains nothing."""
    return max(0.0, cost - 1.0) / (own.hits * k) if k and own.hits else 0.0


def _at_load(k: int, own: AssumedAcceptance, steps: StepCosts, requests: int) -> LoadPrediction:
    draft = [steps.draft(requests, n) for n in range(MOST_K + 1)]
    verify = [1.0] + [steps.verify(requests, n + 1) for n in range(1, MOST_K + 1)]
    costs = tuple(mean_cost(own, verify[n], draft[n], n) for n in range(MOST_K + 1))
    best = best_k(lambda n: own.length(own.middle, n) / costs[n], steps.most_drafts)
    if best and (here := steps.measured_here(requests)) is not None:
        best = next_step(here).k  # which stays where another gains hardly more
    asked = verify[k] if k <= MOST_K else steps.verify(requests, k + 1)
    spread = COST_SPREAD if steps.measured_here(requests) is None else 0.0
    gains = tuple(gain_range(own, n, costs[n], spread) for n in range(MOST_K + 1))
    each = steps.draft(requests, k)
    cost = mean_cost(own, asked, each, k)
    given = gain_range(own, k, cost, spread)
    return LoadPrediction(
        requests=requests,
        plain_step_s=steps.plain_s(requests),
        verify_cost=asked,
        draft_cost=each,
        break_even_rate=_break_even(own, cost, k),
        low=given.low,
        middle=given.middle,
        high=given.high,
        best_k=best,
        best_low=gains[best].low,
        best=gains[best].middle,
        best_high=gains[best].high,
        costs=costs,
        gains=gains,
    )


def _crossing(loads: Sequence[int], gains: Sequence[float]) -> float:
    """Requests in flight beyond which no load gains, between the loads on a logarithmic scale."""
    last = max((i for i, gain in enumerate(gains) if gain > 1.0), default=-1)
    if last < 0:
        return 0.0
    if last == len(gains) - 1:
        return math.inf
    share = (gains[last] - 1.0) / (gains[last] - gains[last + 1])
    return float(loads[last] * (loads[last + 1] / loads[last]) ** share)


def _arrivals(setup: Setup, target: CostModel, requests: float) -> float:
    """Requests per second that keep `requests` in flight while decoding plainly."""
    if requests == 0.0 or math.isinf(requests):
        return requests
    settings = setup.settings
    running, prompt = max(1, round(requests)), max(1, settings.context - settings.output_tokens)
    step = target.seconds(StepShape(running, sequences=running, context=settings.context))
    prefill = target.seconds(StepShape(prompt, context=prompt / 2))
    return requests / (settings.output_tokens * step.seconds + prefill.seconds)


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
        """How much sooner the whole answer is there."""
        return self.end_to_end_plain_s / self.end_to_end_s

    @property
    def end_to_end_low(self) -> float:
        """The same at the low end of the speed-up."""
        return self.end_to_end_plain_s / self.end_to_end_slow_s


def latency(setup: Setup, load: LoadPrediction, k: int) -> PlannedLatency:
    """What a typical request of `setup` waits for at a load, with k drafts or, if 0, none."""
    settings = setup.settings
    prompt = max(1, settings.context - settings.output_tokens)
    target, drafter = step_models(setup)
    shape = StepShape(prompt, context=prompt / 2, prompt_rows=prompt)
    read_s = target.seconds(shape).seconds
    # A request that comes while others are decoded waits for half a step of theirs on average.
    wait_s = load.plain_step_s / 2 if load.requests > 1 else 0.0
    plain_s = read_s + wait_s
    tpot_plain_s = load.plain_step_s
    if k == 0:
        first_s, tpot_s, slow_s = plain_s, tpot_plain_s, tpot_plain_s
    else:
        # A drafter that keeps keys and values reads the prompt too, but for heads of blocks.
        own_s = drafter.seconds(shape).seconds if drafter and _reads_prompts(setup) else 0.0
        cost, gain = load.cost(k), load.gain(k)
        first_s = read_s + own_s + wait_s * cost
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


def _reads_prompts(setup: Setup) -> bool:
    """Whether a prompt passes through all of a drafter's layers: with keys and values of its own
    it does, but for heads of whole blocks, which make theirs of the target's states directly."""
    drafting = setup.drafting
    return drafting is not None and drafting.own_kv and not setup.drafts_in_one_pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSchedule:
    """What to draft at which load."""

    steps: tuple[tuple[int, int], ...]
    """(k, last number of requests in flight) by rising load; the last entry has no end (0)."""
    decided: int
    """At the load that decides the verdict, 0: off there; engines without a list have it always."""
    follows: bool
    """Whether the engine that was asked for can be told the steps, or finds them by itself."""

    @property
    def falls(self) -> bool:
        """Whether more load never wants more drafts, so that an engine can be told."""
        return _falling(self.steps)

    @property
    def most(self) -> int:
        """The largest k of all loads."""
        return max((k for k, _ in self.steps), default=0)

    def at(self, requests: int) -> int:
        """k with so many requests in flight."""
        return next(k for k, last in self.steps if last == 0 or requests <= last)

    def told(self, requests: int) -> int:
        """k of the emitted command with so many requests in flight."""
        return self.at(requests) if self.follows else self.decided

    @property
    def words(self) -> str:
        """The steps as a sentence."""
        parts, first = [], 1
        for k, last in self.steps:
            where = f"{first} and more" if first > 1 else ""
            if last:
                where = f"{first} to {last}" if last > first else f"{first}"
            parts.append(
                (f"k = {k}" if k else "off") + (f" at {where}" if where else " throughout")
            )
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
    """What the prediction would choose by load."""
    ks = [(chosen_k(setup, load), load.requests) for load in prediction.loads]
    deciding = prediction.at(setup.deciding)
    steps = _joined(ks)
    return DraftSchedule(
        steps=steps, decided=chosen_k(setup, deciding), follows=_can_follow(setup, steps)
    )


def _can_follow(setup: Setup, steps: tuple[tuple[int, int], ...]) -> bool:
    engine, drafting = setup.settings.engine, setup.drafting
    if len(steps) == 1 or drafting is None or engine == "foretoken":
        return True
    # A length of its own, such as a depth of suffixes, has no list.
    return engine == "vllm" and _falling(steps) and drafting.default_drafts_key is None


def _falling(steps: tuple[tuple[int, int], ...]) -> bool:
    ks = [k for k, _ in steps]
    return ks == sorted(ks, reverse=True)


def _joined(ks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    steps: list[tuple[int, int]] = []
    for k, requests in ks:
        if steps and steps[-1][0] == k:
            steps[-1] = (k, requests)
        else:
            steps.append((k, requests))
    steps[-1] = (steps[-1][0], 0)
    return tuple(steps)
