"""Memory by size times bytes, and the same with what that leaves out."""

from typing import Any

import pytest

from foretoken.lab.plan.memory_plan import DraftLoad, nominal_billions, nominal_table, plan_memory
from foretoken.lab.plan.setup import PlanSettings, resolve_setup
from foretoken.lab.plan.sizes import load_plan_model

PAIR = ("llama-3.1-70b", "llama-3.1-8b")


def table(memory_gb: float, utilization: float) -> dict[str, tuple[float, float, float]]:
    """(weights, left, budget) by quantizations."""
    target, draft = (load_plan_model(name, "t") for name in PAIR)
    rows = nominal_table(target, draft, memory_gb=memory_gb, utilization=utilization)
    return {
        f"{row.target_quantization}+{row.draft_quantization}": (
            row.weights_gb,
            row.left_gb,
            round(row.budget_gb, 1),
        )
        for row in rows
    }


def test_the_table_on_two_h100() -> None:
    assert table(160, 0.9) == {
        "int8+none": (70, 90, 74),
        "int8+bf16": (86, 74, 58),
        "bf16+bf16": (156, 4, -12),
        "int8+int8": (78, 82, 66),
        "int4+bf16": (51, 109, 93),
        "int4+int4": (39, 121, 105),
    }
    assert table(160, 0.92)["int8+bf16"] == (86, 74, 61.2)
    assert table(160, 0.92)["bf16+bf16"] == (156, 4, -8.8)


def test_one_h100_has_less_to_spare_than_it_says() -> None:
    assert table(80, 0.9)["int8+none"] == (70, 10, 2)
    assert table(80, 0.9)["int4+bf16"] == (51, 29, 21)


def test_the_table_on_two_h200() -> None:
    weights, left, budget = table(282, 0.9)["bf16+bf16"]
    assert (weights, left) == (156, 126)
    assert budget == pytest.approx(97.8)


def test_a_draft_costs_more_tokens_than_its_weights() -> None:
    target, draft = (load_plan_model(name, "t") for name in PAIR)
    [row] = nominal_table(target, draft, memory_gb=160, rows=[("int8", "bf16")])
    assert row.tokens_plain // 1000 == 225
    assert row.tokens_one_for_one // 1000 == 177
    assert row.tokens // 1000 == 126
    assert "44%" in row.differs and "22%" in row.differs


def test_what_does_not_load_is_said() -> None:
    target, draft = (load_plan_model(name, "t") for name in PAIR)
    [row] = nominal_table(target, draft, memory_gb=160, rows=[("bf16", "bf16")])
    assert "does not load" in row.differs


@pytest.mark.parametrize(
    ("name", "billions"), [(PAIR[0], 70), (PAIR[1], 8), ("qwen2.5-0.5b", 0.5), ("demo", None)]
)
def test_nominal_sizes_come_from_the_name(name: str, billions: float | None) -> None:
    model = load_plan_model(name, "t")
    expected = round(model.params / 1e9, 1) if billions is None else billions
    assert nominal_billions(model) == expected


def test_a_draft_on_one_rank_costs_twice() -> None:
    settings = PlanSettings(
        target=PAIR[0], draft=PAIR[1], quantization="int8", count=2, utilization=0.92, overhead_gb=0
    )
    load = DraftLoad(weight_bytes=16e9, kv_bytes_per_token=0, lookahead=5)
    even = plan_memory(resolve_setup(settings), load)
    one_rank = resolve_setup(PlanSettings(**{**_fields(settings), "draft_tensor_parallel_size": 1}))
    uneven = plan_memory(one_rank, load)
    assert even.kv_pool_bytes - uneven.kv_pool_bytes == pytest.approx(16e9)
    assert uneven.imbalance_bytes == pytest.approx(16e9)
    assert uneven.fullest_rank_bytes - even.fullest_rank_bytes == pytest.approx(8e9)


def _fields(settings: PlanSettings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in PlanSettings.__dataclass_fields__}
