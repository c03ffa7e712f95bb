"""The planner knows a method by its record alone."""

from typing import Any

import pytest

from foretoken.config import methods
from foretoken.config.methods import DraftingMethod, MethodPlan
from foretoken.errors import ConfigError
from foretoken.lab.plan.memory_plan import draft_load
from foretoken.lab.plan.planner import SpeculationPlan, build_plan
from foretoken.lab.plan.predict import step_costs
from foretoken.lab.plan.setup import PlanSettings, planned_methods, resolve_setup

TOY = DraftingMethod(
    name="toy",
    summary="a head of a test",
    source="here",
    drafts_with="head",
    code="foretoken.proposers.base",
    own_kv=True,
    plan=MethodPlan(
        usual_drafts=2,
        needs="patience",
        acceptance={"code": (0.5, 0.6), "": (0.1, 0.2)},
        features=1,
    ),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method in the table for the length of a test."""
    monkeypatch.setitem(methods._table, TOY.name, TOY)


@pytest.mark.usefixtures("toy")
def test_a_method_of_the_table_is_planned() -> None:
    settings = PlanSettings(
        target="llama-3.1-8b", method="toy", workload="code", engine="foretoken"
    )
    plan = build_plan(settings)
    assert (plan.setup.k, plan.setup.has_weights) == (2, True)
    assert (plan.prediction.acceptance.low, plan.prediction.acceptance.high) == (0.5, 0.6)
    assert plan.speculating.draft_weight_bytes > 0 and plan.speculating.draft_kv_bytes_per_token > 0
    [outlook] = [found for found in plan.outlooks if found.method == "toy"]
    assert (outlook.needs, outlook.available) == ("patience", False)
    assert '"method": "toy"' in plan.commands["foretoken"]
    assert plan.commands["vllm"] == "# vllm does not draft with toy"
    assert plan.commands["llama.cpp"] == "# llama.cpp does not draft with toy"


@pytest.mark.usefixtures("toy")
def test_other_workloads_take_what_stands_for_all() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-8b", method="toy", workload="chat"))
    assert plan.prediction.acceptance.low == 0.1


def test_what_the_table_says_nothing_of_is_not_planned() -> None:
    assert set(planned_methods()) == {
        "draft_model", "eagle3", "eagle", "mlp", "medusa", "ngram", "suffix", "mtp", "dflash",
        "dspark",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'eagle3'"):
        PlanSettings(target="llama-3.1-8b", method="eagle33")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_all_drafts_of_a_block_cost_one_pass(method: str) -> None:
    """Fifteen drafts take hardly more drafting than one, where a head that drafts one by one takes
    fifteen passes."""
    block, chain = (
        step_costs(resolve_setup(PlanSettings(target="qwen3-8b", method=name)))
        for name in (method, "eagle3")
    )
    assert 15 * block.draft(1, 15) < 1.1 * block.draft(1, 1)
    assert 15 * chain.draft(1, 15) == pytest.approx(15 * chain.draft(1, 1))
    assert block.draft(1, 1) > 2 * chain.draft(1, 1), "it has five layers, not one"


def test_a_head_of_a_mixture_has_no_experts() -> None:
    """Counted as layers of the target, five would be six gigabytes; published ones are one."""
    mixture = resolve_setup(PlanSettings(target="qwen3-30b-a3b", method="dflash"))
    assert 0.4e9 < draft_load(mixture).weight_bytes < 1.2e9
    own = resolve_setup(PlanSettings(target="deepseek-v3", method="mtp"))
    assert draft_load(own).weight_bytes > 5e9, "layers of the checkpoint are like its others"


def test_a_rounded_head_is_counted_and_told() -> None:
    def asked(**given: Any) -> SpeculationPlan:
        settings: dict[str, Any] = {
            "target": "qwen3-8b", "device": "epyc-9755", "engine": "foretoken"
        }  # fmt: skip
        return build_plan(PlanSettings(**{**settings, "method": "dspark", **given}))

    plain, rounded = asked(), asked(draft_quantization="int8")
    ratio = rounded.speculating.draft_weight_bytes / plain.speculating.draft_weight_bytes
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert rounded.prediction.at(1).draft_cost < plain.prediction.at(1).draft_cost
    assert '"quantization": "int8"' in rounded.commands["foretoken"]
    assert '"quantization"' not in plain.commands["foretoken"]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_blocks_are_planned_for_every_engine(method: str) -> None:
    plan = build_plan(PlanSettings(target="qwen3-8b", method=method, concurrency=1))
    assert plan.verdict.speculates
    assert f'"method": "{method}"' in plan.commands["vllm"]
    assert f"--spec-type draft-{method} " in plan.commands["llama.cpp"]
    assert f'"method": "{method}"' in plan.commands["foretoken"]
    [outlook] = [found for found in plan.outlooks if found.method == method]
    assert not outlook.available and "trained for exactly this target" in outlook.needs


def test_no_more_drafts_are_proposed_than_a_usual_block_has() -> None:
    def most(**given: Any) -> int:
        return max(load.best_k for load in build_plan(PlanSettings(**given)).prediction.loads)

    math = {"target": "qwen3-8b", "workload": "math", "device": "h200"}
    assert most(**math, method="dspark") == 7 < most(**math, method="dflash") <= 15
    assert most(**math, method="dspark", num_speculative_tokens=16) > 7, "who asks has such a head"
