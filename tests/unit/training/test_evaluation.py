"""What a drafter is worth: from counts and times to numbers, on tiny pairs in the engine."""

from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from foretoken.testing import write_tiny_llama
from foretoken.training.evaluation import (
    Accepted,
    DecodingStep,
    EvalPlan,
    accepted,
    expected_speedups,
    measure_worth,
    open_pair,
)
from foretoken.types import CompletionOutput, RequestMetrics
from tests.e2e.heads import write_head


def _output(drafted: tuple[int, ...], kept: tuple[int, ...]) -> CompletionOutput:
    metrics = RequestMetrics(
        queued_s=0,
        first_token_s=0,
        finished_s=1,
        num_preemptions=0,
        num_cached_tokens=0,
        drafted_per_step=drafted,
        accepted_per_step=kept,
    )
    return CompletionOutput(index=0, text="", token_ids=(), metrics=metrics)


def test_acceptance_leaves_out_what_was_not_drafted() -> None:
    """Steps without drafts do not count; a short draft says nothing about later positions."""
    found = accepted([_output((3, 0, 3), (3, 0, 1)), _output((1, 3), (1, 0))])
    assert found.num_verifications == 4
    assert found.by_position == pytest.approx((3 / 4, 1 / 3, 1 / 3))
    assert found.lengths == pytest.approx((1.75, 1.75 + 1 / 3, 1.75 + 2 / 3))


def test_nothing_drafted_is_length_one() -> None:
    assert accepted([_output((0,), (0,))]).lengths == (1.0,)


def test_speedups_follow_from_acceptance_and_cost() -> None:
    costs = [
        DecodingStep(drafts=k, total_s=s, drafting_s=0, verifying_s=0)
        for k, s in enumerate((2.0, 2.5, 4.0))
    ]
    acceptance = Accepted(by_position=(0.5, 0.5), lengths=(1.5, 2.0), num_verifications=9)
    assert expected_speedups(acceptance, costs) == pytest.approx((1.2, 1.0))


@pytest.mark.parametrize("name", ["draft", "mlp"])
def test_a_pair_is_measured(name: str, tmp_path: Path) -> None:
    """The target as its own draft is always right; a random head is not; costs of every k."""
    target = write_tiny_llama(tmp_path / "target", seed=1)
    drafter = target if name == "draft" else write_head(tmp_path / name, name, target)
    plan = EvalPlan(temperatures=(0.0, 1.0), max_tokens=20, cost_repeats=1)
    engine = open_pair(str(target), str(drafter), None if name == "draft" else name, plan)
    worth = measure_worth(engine, [[5, 6, 7], [9, 8]], plan)
    most = 8 if name == "draft" else 3
    assert [cost.drafts for cost in worth.costs][:2] == [0, 1] and len(worth.costs) <= most + 1
    greedy = worth.acceptance["0"]
    assert len(greedy.by_position) == most
    if name == "draft":
        assert greedy.by_position == (1.0,) * 8 and greedy.lengths[-1] == 9.0
    else:
        assert greedy.by_position[-1] < 1.0
    assert set(worth.as_record()) == {"acceptance", "costs", "speedups"}
    assert all(cost.total_s > cost.drafting_s >= 0 for cost in worth.costs)


def test_plans_are_checked() -> None:
    with pytest.raises(ConfigError, match="--temperature"):
        EvalPlan(temperatures=())
    with pytest.raises(ConfigError, match="--max-tokens"):
        EvalPlan(max_tokens=1)
