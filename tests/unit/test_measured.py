"""The measured limit finds the fastest length of each load, and drafts nowhere at a loss."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from foretoken.control.budget import PREDICTED_DRAFTS, RequestBudget
from foretoken.control.cost import TRIAL_STEPS
from foretoken.control.measured import RETRY, MeasuredLimit
from foretoken.control.plan import DraftPlan, StepLoad
from foretoken.types import StepStats
from tests.unit.proposing import make_sequence

Cost = Callable[[int, int], tuple[float, float]]
"""(running sequences, drafts) -> seconds of the step and tokens per sequence."""


def load(running: int) -> StepLoad:
    return StepLoad(num_decoding=running, num_prefilling=0, num_waiting=0)


def stats(running: int, drafts: int, cost: Cost, prefilled: int = 0) -> StepStats:
    seconds, tokens = cost(running, drafts)
    return StepStats(
        num_sequences=running,
        num_tokens=running * (1 + drafts) + prefilled,
        num_drafts=running if drafts else 0,
        num_draft_tokens=running * drafts,
        num_accepted_tokens=0,
        num_accepted_tokens_per_pos=(),
        num_output_tokens=round(running * tokens),
        num_waiting=0,
        drafting_s=0.0,
        verifying_s=seconds,
        total_s=seconds,
        num_sampled=running,
    )


def plan(limit: MeasuredLimit, running: int) -> DraftPlan:
    """A step whose sequences all have the length that the load leaves them."""
    length = limit.at(load(running))
    return DraftPlan(load=load(running), drafts=(length,) * running, limit=length)


def steps(limit: MeasuredLimit, running: int, count: int, cost: Cost) -> list[int]:
    found = []
    for _ in range(count):
        planned = plan(limit, running)
        found.append(planned.drafts[0])
        limit.observe(planned, stats(running, found[-1], cost))
    return found


def rows_are_dear(running: int, drafts: int) -> tuple[float, float]:
    """Two of three drafts accepted on average; from three sequences on, rows cost what they are."""
    rows = running * (1 + drafts)
    return 0.01 + 0.004 * max(0, rows - 6), 1 + 0.6 * drafts


def test_it_drafts_where_that_is_faster_and_nowhere_else() -> None:
    limit = MeasuredLimit(5)
    begun = 3 * (TRIAL_STEPS + 1)
    for running, expected in ((1, 5), (16, 0), (32, 0)):
        found = steps(limit, running, 2000, rows_are_dear)
        assert found[: TRIAL_STEPS + 1] == [0] * (TRIAL_STEPS + 1)  # nothing is known yet
        assert found[begun] == expected
        assert found.count(expected) > 0.93 * len(found), running
        assert {0, 2, 5} == set(found)
    assert [one["num_speculative_tokens"] for one in limit.describe()] == [5, 0, 0]
    assert [one["sequences"] for one in limit.describe()] == ["1", "9 to 16", "17 to 32"]


def test_a_text_that_changes_is_noticed() -> None:
    limit = MeasuredLimit(5)
    steps(limit, 1, 100, rows_are_dear)

    def worthless(running: int, drafts: int) -> tuple[float, float]:
        return 0.01 + 0.001 * drafts, 1.0

    assert steps(limit, 1, 400, worthless)[-2:] == [0, 0]
    again = steps(limit, 1, 4000, rows_are_dear)
    assert again[-1] == 5 and again.index(5) <= 4 * RETRY


def test_what_is_hardly_faster_is_left_alone() -> None:
    found = steps(MeasuredLimit(3), 1, 500, lambda _, drafts: (0.01 - 0.0001 * (drafts > 0), 1.0))
    assert found[-1] == 0


def test_a_hiccup_does_not_turn_it_off() -> None:
    limit = MeasuredLimit(5)
    steps(limit, 1, 60, rows_are_dear)
    limit.at(load(1))
    limit.observe(plan(limit, 1), stats(1, 5, lambda *_: (10.0, 1.0)))
    assert steps(limit, 1, 1, rows_are_dear) == [5]


def test_prompts_and_steps_without_wishes_teach_nothing() -> None:
    limit = MeasuredLimit(5)
    for _ in range(50):
        planned = plan(limit, 4)
        assert planned.limit == 0
        limit.observe(planned, stats(4, 0, rows_are_dear, prefilled=100))
    for _ in range(50):
        limit.observe(replace(planned, limit=None), stats(4, 0, rows_are_dear))
    assert limit.describe()[0]["ms_per_token"] == {}


def test_predictions_and_grammars_are_spared() -> None:
    limit = MeasuredLimit(5)
    policy = RequestBudget({"ngram": 5}, limit, limits_free=False)
    plain = make_sequence([1], [2])
    free = make_sequence([1], [2], prediction_ids=(3, 4))
    alone = policy.plan([free], load(1))
    assert (alone.drafts, alone.limit, alone.rests) == ((PREDICTED_DRAFTS,), None, False)
    both = policy.plan([free, plain], load(2))
    assert (both.drafts, both.limit, both.rests) == ((PREDICTED_DRAFTS, 0), 0, True)


@pytest.mark.parametrize("most", [1, 2, 3])
def test_small_numbers_of_drafts(most: int) -> None:
    found = steps(MeasuredLimit(most), 1, 300, lambda _, drafts: (0.01, 1.0 + drafts))
    assert found[-1] == most
