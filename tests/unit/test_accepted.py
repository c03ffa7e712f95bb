"""Acceptance by counts: what every page, log line, metric and verdict says of it."""

import pytest

from foretoken.types.accepted import (
    acceptance_length,
    acceptance_rate,
    accepted_by_position,
    histogram_of,
    reached,
)


def test_nothing_drafted_is_no_error() -> None:
    assert (acceptance_rate(0, 0), acceptance_length(0, 0)) == (0.0, 1.0)
    assert accepted_by_position(histogram_of([]), histogram_of([])) == ()


def test_drafts_that_were_shorter_count_where_they_came_to() -> None:
    """Of 5, 3 and 1 drafts 2, 3 and 0 were accepted; no draft is no verification of a position."""
    drafted, accepted = (5, 3, 1, 0), (2, 3, 0, 0)
    assert histogram_of(accepted) == (2, 0, 1, 1)
    assert reached(histogram_of(drafted)) == [3, 2, 2, 1, 1]
    found = accepted_by_position(histogram_of(accepted), histogram_of(drafted))
    assert found == pytest.approx((2 / 3, 1.0, 0.5, 0.0, 0.0))
    of_all = accepted_by_position(histogram_of(accepted), histogram_of(drafted), of_all=True)
    assert of_all == pytest.approx((0.5, 0.5, 0.25, 0.0, 0.0))
    assert acceptance_length(sum(accepted), 3) == 1.0 + 5 / 3
