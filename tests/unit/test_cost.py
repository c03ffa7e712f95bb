"""The models of step time: lines through measured steps, plain steps, rooflines, passes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.control.cost import (
    LineCost,
    PassCost,
    PlainCost,
    RelativeCost,
    RooflineCost,
    RowCost,
    StepShape,
    TokenCost,
)


def test_a_line_is_found_through_the_steps() -> None:
    cost = RowCost()
    for rows in (1, 6, 3, 9, 1, 4) * 3:
        cost.observe(StepShape(rows), 0.01 + 0.002 * rows)
    assert cost.row_seconds() == pytest.approx(0.002, rel=0.02)
    assert cost.seconds(StepShape(5)).seconds == pytest.approx(0.02, rel=0.02)


def test_steps_of_one_size_give_a_guess_and_no_nonsense() -> None:
    cost = RowCost()
    for _ in range(10):
        cost.observe(StepShape(1), 0.01)
    assert 0 < cost.row_seconds() < 0.01
    assert cost.seconds(StepShape(1)).seconds == pytest.approx(0.01)


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(1e-6, 10)), max_size=30))
def test_costs_are_never_negative(steps: list[tuple[int, float]]) -> None:
    cost = RowCost()
    for rows, seconds in steps:
        cost.observe(StepShape(rows), seconds)
    assert cost.row_seconds() >= 0
    assert cost.seconds(StepShape(1)).seconds > 0


def test_what_is_not_known_has_no_bounds() -> None:
    assert math.isinf(RowCost().seconds(StepShape(1)).sd)


def test_plain_steps_of_other_sizes_stand_in_against_speculation() -> None:
    cost = PlainCost()
    cost.observe(StepShape(4, sequences=4), 2.0)
    assert cost.seconds(StepShape(1, sequences=1)).seconds == 0.5
    assert cost.seconds(StepShape(9, sequences=9)).seconds == 2.0


def test_a_line_counts_rows_after_the_first() -> None:
    assert LineCost(1.0, 0.1).seconds(StepShape(rows=6)).seconds == 1.5


def roofline(**fields: float) -> RooflineCost:
    """A device that reads 100 bytes and multiplies 1000 times a second."""
    given = {"weight_bytes": 50.0, "bandwidth": 100.0, "flops_per_s": 1000.0, **fields}
    return RooflineCost(kv_bytes=lambda _: 2.0, flops=lambda context: 10.0 + context, **given)


def test_a_roofline_is_the_larger_of_reading_and_multiplying() -> None:
    assert roofline().seconds(StepShape(1)).seconds == 0.5
    assert roofline().seconds(StepShape(100)).seconds == 1.0
    with_context = StepShape(2, sequences=2, context=25.0)
    assert roofline().seconds(with_context).seconds == (50 + 2 * 25 * 2) / 100
    assert roofline(floor_s=3.0).seconds(StepShape(1)).seconds == 3.0
    ranks = roofline(exchange_s=1.0, exchange_row_s=0.5)
    assert ranks.seconds(StepShape(4)).seconds == 0.5 + 1.0 + 2.0


def test_more_rows_read_more_experts() -> None:
    cost = roofline(expert_bytes=50.0, expert_share=0.5)
    assert cost.seconds(StepShape(1)).seconds == 0.75
    assert cost.seconds(StepShape(2)).seconds == 0.875


def test_one_long_pass_does_not_spoil_the_measured_time() -> None:
    cost = PassCost()
    assert cost.seconds == 0.0
    for seconds in (1.0, 1.0, 100.0, 1.0):
        cost.observe(seconds)
    assert cost.seconds < 1.3
    before = cost.seconds
    cost.doubt()
    assert cost.seconds < before


def test_tokens_are_never_believed_to_be_dearer_than_plain_ones() -> None:
    cost = RelativeCost()
    assert cost.share == 1.0
    cost.observe(3.0, 1.0)
    assert cost.share == 1.0
    for _ in range(200):
        cost.observe(1.0, 4.0)
    assert cost.share == pytest.approx(0.25, rel=0.05)


def test_a_doubted_length_follows_the_next_steps() -> None:
    kept, doubted = TokenCost(), TokenCost()
    for cost in (kept, doubted):
        for _ in range(100):
            cost.observe(1.0, 1.0)
    doubted.doubt()
    for cost in (kept, doubted):
        for _ in range(6):
            cost.observe(2.0, 1.0)
    assert kept.per_token < 1.3 < 1.7 < doubted.per_token
