"""The planner knows a method by its record alone."""

import pytest

from foretoken.config import methods
from foretoken.config.methods import DraftingMethod, MethodPlan
from foretoken.errors import ConfigError
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings, planned_methods

TOY = DraftingMethod(
    name="toy",
    summary="a head of a test",
    source="here",
    drafts_with="head",
    code="foretoken.proposers.base",
    own_kv=True,
    plan=MethodPlan(
        usual_drafts=2,
        effort=9,
        needs="patience",
        acceptance={"code": (0.5, 0.6), "": (0.1, 0.2)},
        advertised=(1.1, 1.2),
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
    assert (outlook.needs, outlook.effort, outlook.available) == ("patience", 9, False)
    said = {finding.check: finding.message for finding in plan.findings}
    assert "1.1x to 1.2x" in said["method_range"]
    assert '"method": "toy"' in plan.commands["foretoken"]
    assert plan.commands["vllm"] == "# vllm does not draft with toy"
    assert plan.commands["llama.cpp"] == "# llama.cpp does not draft with toy"


@pytest.mark.usefixtures("toy")
def test_other_workloads_take_what_stands_for_all() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-8b", method="toy", workload="chat"))
    assert plan.prediction.acceptance.low == 0.1


def test_what_the_table_says_nothing_of_is_not_planned() -> None:
    assert set(planned_methods()) == {
        "draft_model", "eagle3", "eagle", "mlp", "medusa", "ngram", "suffix", "mtp",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'eagle3'"):
        PlanSettings(target="llama-3.1-8b", method="eagle33")
