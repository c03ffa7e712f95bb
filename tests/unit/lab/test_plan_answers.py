"""One question has one answer on the page: what was measured, what fits, a whole answer, a rate."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError
from foretoken.lab.plan.page.one_page import print_plan
from foretoken.lab.plan.planner import SpeculationPlan, build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.lab.plan.speedup import MeasuredCost, next_step

BIG: dict[str, Any] = {
    "target": "llama-3.1-70b", "draft": "llama-3.1-8b", "quantization": "fp8", "count": 2,
}  # fmt: skip


def plan_of(measured: MeasuredCost | None = None, **changes: Any) -> SpeculationPlan:
    return build_plan(PlanSettings(**{**BIG, **changes}), measured)


def page(plan: SpeculationPlan) -> str:
    text = io.StringIO()
    print_plan(Console(file=text, width=200, color_system=None), plan, None)
    return text.getvalue()


def cost_of(
    verify: float, draft: float, length: float, k: int = 5, share: float = 1.0
) -> MeasuredCost:
    return MeasuredCost(
        k=k, acceptance_length=length, verify_cost=verify, draft_cost=draft, draft_share=share
    )


@pytest.mark.parametrize("slo", ["tpot", "throughput"])
@pytest.mark.parametrize(
    ("cost", "speculates"),
    [
        (cost_of(2.5, 0.3, 1.4), False),
        (cost_of(1.1, 0.05, 1.2), True),
        (cost_of(1.2, 0.2, 3.4), True),
        (cost_of(1.02, 0.02, 2.9, k=2), True),
        (cost_of(1.5, 0.12, 2.5, k=10), True),
        (cost_of(1.6, 0.0, 3.0, share=0.35), True),
    ],
)
def test_what_was_measured_decides(cost: MeasuredCost, speculates: bool, slo: str) -> None:
    """Verdict, table, times and the next step say one number, by whole time."""
    plan, step = plan_of(cost, slo=slo), next_step(cost)
    load = plan.prediction.at(plan.setup.deciding)
    assert plan.verdict.speculates == speculates == (cost.gain(step.k) > 1.0)
    for k in (1, cost.k, step.k):
        assert load.gain(k).low == load.gain(k).high == pytest.approx(cost.gain(k))
    share, each = cost.draft_share, cost.verify_cost + cost.k * cost.draft_cost
    tokens = 1.0 - share + share * cost.acceptance_length
    assert step.speed_up == pytest.approx(tokens / (1.0 - share + share * each))
    told = f"{load.gain(plan.verdict.k or cost.k).middle:.2f}x per token by what was measured"
    assert told in plan.verdict.reason
    if speculates:
        assert plan.verdict.word == "use" and plan.verdict.k == step.k
        assert f"{load.gain(step.k).middle:.2f}x k{step.k}" in page(plan)


def test_a_measured_verification_is_every_drafters() -> None:
    """Look-ups pay for the same rows: they may not be promised what the machine does not give."""
    dear, cheap = (plan_of(cost_of(verify, 0.3, 1.4)) for verify in (2.5, 1.05))
    gains = [
        next(one for one in plan.outlooks if one.method == "ngram").prediction.at(8).best
        for plan in (dear, cheap)
    ]
    assert gains[0] < gains[1] - 0.1


def test_a_fit_says_how_many_steps_draft(tmp_path: Path) -> None:
    file = tmp_path / "fit.json"
    fit = {"k": 3.0, "acceptance_rate": 0.6, "verify_cost": {"estimate": 1.6},
           "draft_cost": {"estimate": 0.0}, "draft_share": 0.2}  # fmt: skip
    file.write_text(json.dumps(fit))
    options = ["--method", "ngram", "--measured", str(file), "--json"]
    result = CliRunner().invoke(app, ["lab", "plan", "qwen3-8b", *options])
    document = json.loads(result.stdout)
    expected = (1 + 0.2 * 1.8) / (1 + 0.2 * 0.6)
    assert document["next_step"]["speed_up"] == pytest.approx(expected)
    assert document["setup"]["measured"]["draft_share"] == 0.2


def test_the_command_leaves_off_what_was_measured_to_lose() -> None:
    options = ["--draft", "llama-3.1-8b", "--quantization", "fp8", "--count", "2"]
    options += ["--measured", "2.5,0.3,1.4"]
    result = CliRunner().invoke(app, ["lab", "plan", "llama-3.1-70b", *options])
    assert result.exit_code == 1
    assert "MEASURE MORE: " not in result.output and "LEAVE IT OFF: 0.35x" in result.output
    with pytest.raises(ConfigError, match="the one that was measured"):
        plan_of(cost_of(1.2, 0.2, 3.4), draft="llama-3.1-8b,llama-3.2-1b")


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_rate_is_of_all_drafted_tokens(k: int) -> None:
    plan = plan_of(rate="0.38", num_speculative_tokens=k)
    own = plan.prediction.acceptance
    assert ConstantAcceptance(own.middle).rate(k) == pytest.approx(0.38)
    assert plan.prediction.rates(8, k)[0] == pytest.approx(0.38)
    assert plan.other_reading is None


def test_an_acceptance_that_can_be_read_in_two_ways_is_asked_about() -> None:
    plan, as_rate = plan_of(acceptance="0.38"), plan_of(rate="0.38")
    assert plan.other_reading is not None
    assert plan.other_reading.verdict == as_rate.verdict
    assert plan.other_reading.chance == pytest.approx(as_rate.prediction.acceptance.middle)
    assert plan.verdict.word != as_rate.verdict.word
    text = page(plan)
    assert "Which is it? --acceptance 0.38 is read as the chance" in text
    assert "say --rate 0.38" in text and as_rate.verdict.reason in text
    assert plan_of(acceptance="0.38", num_speculative_tokens=1).other_reading is None
    assert "Which is it?" not in page(plan_of(acceptance="0.9"))


@pytest.mark.parametrize("given", [{"rate": "38"}, {"rate": "0.4", "acceptance": "0.4"}])
def test_a_wrong_rate_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.rate"):
        plan_of(**given)


@pytest.mark.parametrize(
    ("engine", "heat", "said"),
    [
        ("vllm", 0.8, "Drafts are drawn in this command, as the temperature 0.8 is above 0.5"),
        ("vllm", 0.5, "Drafts are greedy in this command, as the temperature 0.5 is not above"),
        ("llama.cpp", 0.8, "Drafts are drawn in this command"),
        ("vllm", 0.0, ""),
        ("foretoken", 0.8, ""),
    ],
)
def test_how_drafts_are_sampled_is_said(engine: str, heat: float, said: str) -> None:
    plan = plan_of(engine=engine, temperature=heat, draft="llama-3.2-1b", count=8)
    assert plan.verdict.speculates
    text = page(plan)
    assert (said in text) if said else ("in this command" not in text)
    assert ("probabilistic" in plan.commands[engine]) == ("drawn" in said)


def test_no_more_are_in_flight_than_fit() -> None:
    """One request of 4,096 tokens fits beside 70 GB of weights on one device."""
    plan = plan_of(draft=None, quantization="int8", count=1)
    assert (plan.plain.requests, plan.setup.usual, plan.setup.peak) == (1, 1, 1)
    assert "and 1 in flight (as many as fit; the rest of 8 waits)" in plan.verdict.reason
    text = page(plan)
    assert "8 usual" not in text and "peak needs keys and values of 262,144 tokens" in text
    assert not re.search(r"[1-9]\d{2,}%", text.replace("100%", ""))


def test_a_draft_beside_a_target_without_room_is_no_percentage() -> None:
    text = page(plan_of(target="llama-3.1-405b", count=1))
    assert "more than what the target leaves" in text and "the target alone is larger than" in text


@pytest.mark.parametrize("written", [20, 64, 1024])
def test_the_whole_answer_is_in_the_headline(written: int) -> None:
    plan = plan_of(draft="llama-3.2-1b", output_tokens=written)
    times = plan.latencies[0]
    whole = f"{times.end_to_end_gain:.2f}x for a whole answer of {written:,} tokens"
    assert whole.replace(",", "") in page(plan).splitlines()[0].replace(",", "")
    assert times.end_to_end_gain == pytest.approx(times.end_to_end_plain_s / times.end_to_end_s)


def test_a_gain_that_may_be_a_loss_of_whole_answers_is_measured_first() -> None:
    plan = plan_of(draft="llama-3.1-8b", output_tokens=20, count=4)
    assert plan.prediction.at(8).gain(plan.verdict.k).low > 1.0
    assert plan.latencies[0].end_to_end_low < 1.0 and plan.verdict.word == "measure"


def test_a_draft_model_on_fewer_ranks_is_what_lint_says_it_is() -> None:
    for engine, level in (("vllm", "error"), ("llama.cpp", "warning")):
        plan = plan_of(draft="llama-3.2-1b", draft_tensor_parallel_size=1, engine=engine)
        [found] = [one for one in plan.findings if one.check == "tp_symmetry"]
        assert found.level == level
        if engine == "vllm":
            assert "split the draft over 2 ranks" in plan.verdict.reason and plan.instead is None
            assert '"method"' not in plan.commands[engine]


def test_what_an_engine_imports_is_said() -> None:
    for engine, needs in (("vllm", True), ("foretoken", False)):
        plan = plan_of(draft=None, method="suffix", engine=engine)
        assert plan.verdict.speculates
        assert ("It needs the package arctic-inference" in page(plan)) == needs
    call = ["lab", "tune", "vllm serve m", "--workload", "demo", "--drafter", "suffix", "--dry-run"]
    assert "imports arctic-inference" in CliRunner().invoke(app, call).output
