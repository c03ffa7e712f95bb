"""Budgets: what the drafters allow, the load leaves, and the request asks for."""

from typing import Any

import pytest

from foretoken.control.budget import PREDICTED_DRAFTS, LivePolicy, LoadLimit, RequestBudget
from foretoken.control.plan import StepLoad
from foretoken.types import DEFAULT_GUARD, Speculation
from tests.unit.proposing import make_sequence

DRAFTERS = {"ngram": 8, "draft_model": 3}


def load(running: int, prefilling: int = 0) -> StepLoad:
    return StepLoad(num_decoding=running - prefilling, num_prefilling=prefilling, num_waiting=99)


def budget_of(policy: RequestBudget, running: int = 1, **request: Any) -> int:
    [most] = policy.plan([make_sequence([1], [2], **request)], load(running)).drafts
    return most


def wishes(**speculation: Any) -> dict[str, Any]:
    return {"params": {"speculation": speculation}}


def test_the_longest_drafter_decides() -> None:
    assert budget_of(RequestBudget(DRAFTERS)) == 8
    assert budget_of(RequestBudget({})) == 0


@pytest.mark.parametrize(
    ("speculation", "expected"),
    [
        ({}, 8),
        ({"enabled": False}, 0),
        ({"num_speculative_tokens": 2}, 2),
        ({"num_speculative_tokens": 0}, 0),
        ({"drafter": "draft_model"}, 3),
        ({"drafter": "draft_model", "num_speculative_tokens": 5}, 3),
        ({"drafter": "ngram", "num_speculative_tokens": 1}, 1),
    ],
)
def test_a_request_may_lower_it(speculation: dict[str, Any], expected: int) -> None:
    assert budget_of(RequestBudget(DRAFTERS), **wishes(**speculation)) == expected


def test_a_prediction_is_drafted_from_without_any_drafter() -> None:
    assert budget_of(RequestBudget({}), prediction_ids=(1, 2)) == PREDICTED_DRAFTS
    off = wishes(enabled=False)
    assert budget_of(RequestBudget({}), prediction_ids=(1, 2), **off) == 0


def test_a_schedule_keeps_gaps_and_the_end_as_they_were() -> None:
    policy = RequestBudget(DRAFTERS, LoadLimit([(1, 2, 8), (4, 5, 3), (8, 9, 0), (12, 12, 1)]))
    found = [budget_of(policy, running) for running in range(1, 14)]
    assert found == [8, 8, 8, 3, 3, 3, 3, 0, 0, 0, 0, 1, 1]
    assert budget_of(policy, 8, prediction_ids=(1, 2)) == 0


def test_off_from_a_batch_size_counts_running_sequences_only() -> None:
    policy = RequestBudget(DRAFTERS, LoadLimit.off_from(4, 1 << 30))
    assert [budget_of(policy, running) for running in (1, 3, 4, 50)] == [8, 8, 0, 0]
    sequence = make_sequence([1], [2])
    assert policy.plan([sequence], load(4, prefilling=3)).drafts == (0,)
    assert policy.plan([sequence], load(3)).drafts == (8,)  # 99 wait


def test_the_guard_is_the_requests_own_then_the_operators() -> None:
    live = LivePolicy()
    policy = RequestBudget(DRAFTERS, live=live)

    def guard(**wishes: Any) -> float:
        return policy.guard(make_sequence([1], [2], params={"speculation": wishes}).request)

    assert guard() == DEFAULT_GUARD
    live.speculation = Speculation(guard=0.3)
    assert (guard(), guard(guard=0.0)) == (0.3, 0.0)
