"""The arithmetic of speculation, the roofline's laws, and the next tuning step."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate.arms import FixedArm
from benchmarks.simulate.compare import ratio_after
from benchmarks.simulate.machine import planned_machine
from benchmarks.simulate.serving import ServingLimits, simulate
from benchmarks.simulate.traffic import DraftChance, RequestClass, Traffic
from foretoken.control.acceptance import ConstantAcceptance
from foretoken.control.cost import speculative_step
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.predict import best_k, predict
from foretoken.lab.plan.setup import PlanSettings, resolve_setup
from tests.marks import slow, slow_but
from tests.unit.lab.test_plan_checks import PAIR


def test_the_rate_falls_with_k_while_the_draft_stays_as_good() -> None:
    rates = [ConstantAcceptance(0.7).rate(k) for k in (1, 3, 5, 8)]
    assert rates == pytest.approx([0.70, 0.51, 0.39, 0.28], abs=0.006)
    lengths = [ConstantAcceptance(0.7).length(k) for k in (1, 3, 5, 8)]
    assert lengths == pytest.approx([1.70, 2.53, 2.94, 3.20], abs=0.005)
    gains = [
        ConstantAcceptance(0.7).length(k) / speculative_step(1.1, 1 / 9, k) for k in (1, 3, 5, 8)
    ]
    assert gains == pytest.approx([1.40, 1.77, 1.78, 1.61], abs=0.01)


def test_the_ceiling_is_not_rate_times_ratio() -> None:
    gains = [
        ConstantAcceptance(0.8).length(k) / speculative_step(1.0, 1 / 9, k) for k in range(1, 60)
    ]
    assert gains[4] == pytest.approx(2.37, abs=0.01)
    assert max(gains) < 0.8 * 9 / 2
    assert max(gains) < 1.0 / (1.0 - 0.8)


@given(st.floats(0.0, 0.99), st.floats(0.0, 0.5), st.floats(0.0, 1.0))
def test_no_k_beats_the_best_k(alpha: float, per_row: float, draft: float) -> None:
    costs = [1 + per_row * k for k in range(17)]
    gains = [
        ConstantAcceptance(alpha).length(n) / speculative_step(costs[n], draft, n)
        for n in range(17)
    ]
    k = best_k(lambda n: gains[n])
    assert (gains[k] if k else 1.0) >= max([1.0, *gains[1:]]) / 1.02
    assert (k == 0) == (max(gains[1:]) <= 1.0)


@pytest.mark.parametrize("method", ["draft_model", "ngram", "eagle3", "suffix"])
def test_predictions_obey_the_roofline(method: str) -> None:
    prediction = predict(resolve_setup(PlanSettings(**PAIR, method=method)))
    for load in prediction.loads:
        assert 1.0 <= load.verify_cost <= prediction.k + 1
        assert load.low <= load.middle <= load.high <= prediction.k + 1
        assert load.plain_step_s > 0
    steps = [load.plain_step_s for load in prediction.loads]
    assert steps == sorted(steps)
    assert prediction.loads[0].verify_cost < 1.1, "one request is bound by reading weights"
    assert prediction.loads[-1].verify_cost > prediction.loads[0].verify_cost


def test_a_perfect_draft_helps_and_a_hopeless_one_hurts() -> None:
    good = predict(resolve_setup(PlanSettings(**PAIR, acceptance="1.0")))
    bad = predict(resolve_setup(PlanSettings(**PAIR, acceptance="0.0")))
    assert good.loads[0].middle > 2
    assert bad.loads[0].middle < 1


@pytest.mark.parametrize(
    "where",
    [
        {"device": "epyc-9654"},
        slow({"device": "h100-sxm", "engine": "foretoken"}),
        {"device": "h100-sxm", "draft": None, "method": "dflash"},
    ],
)
@pytest.mark.parametrize("clients", slow_but([1, 8, 64], 1))
def test_a_plan_predicts_what_the_simulator_serves(where: dict[str, Any], clients: int) -> None:
    """Decoding alone, every draft as likely as the next: a pass reads the draft's weights once for
    all requests, in both."""
    usual = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b", "acceptance": "0.7"}
    settings = PlanSettings.from_mapping({
        **usual, "num_speculative_tokens": 3, "context": 480, "output_tokens": 120, **where
    })  # fmt: skip
    prediction = predict(resolve_setup(settings)).at(clients)
    machine = replace(planned_machine(settings), host_s=0.0)
    kind = RequestClass(
        prompt=240, output=400, varied=False, chances={"draft": DraftChance(chance=0.7)}
    )
    limits = ServingLimits(
        noise=0.0, most_tokens=320 * clients, num_pages=1 << 16, max_num_batched_tokens=1 << 15
    )
    ratios = []
    for seed in range(max(2, 24 // clients)):
        traffic = Traffic(classes=(kind,), requests=clients, clients=clients, seed=seed)
        off, drafted = (simulate(machine, FixedArm(k), traffic, limits) for k in (0, 3))
        # The first steps read prompts, of which the plan's decoding knows nothing.
        ratios.append(ratio_after(drafted, off, 40 * clients))
        plain_s = sorted(step.seconds for step in off.steps)[len(off.steps) // 2]
        assert plain_s == pytest.approx(prediction.plain_step_s, rel=0.05)
    assert fmean(ratios) == pytest.approx(prediction.middle, rel=0.04)


def test_launches_make_small_drafts_dear() -> None:
    small = predict(resolve_setup(PlanSettings(**{**PAIR, "draft": "llama-3.2-1b"})))
    assert small.loads[0].draft_cost > 1.24 / 70.6, "far above the ratio of weights"


def test_schedules_never_rise_with_the_load() -> None:
    plan = build_plan(PlanSettings(**PAIR, acceptance="0.3:0.6", peak_concurrency=512))
    ks = [k for k, _ in plan.schedule.steps]
    assert plan.schedule.falls and ks == sorted(ks, reverse=True)
    assert plan.schedule.steps[-1][1] == 0
