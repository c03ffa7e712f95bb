"""Who goes when among repeated arms, and the interval of their repeats."""

from collections import Counter
from statistics import mean

import pytest

from foretoken.lab.stats.repeats import bootstrap_ends, in_turn


def test_two_arms_take_turns() -> None:
    assert [in_turn("ab", turn) for turn in range(4)] == [list("ab"), list("ba")] * 2


@pytest.mark.parametrize("count", [3, 4, 5])
def test_everyone_goes_first_and_last_equally_often(count: int) -> None:
    orders = [in_turn(range(count), turn) for turn in range(2 * count)]
    for place in (0, -1):
        assert set(Counter(order[place] for order in orders).values()) == {2}
    followers = {(a, b) for order in orders for a, b in zip(order, order[1:], strict=False)}
    assert all((b, a) in followers for a, b in followers), "nobody always follows the same one"


def test_ends_hold_the_statistic_and_repeat_themselves() -> None:
    sample = [1.0, 2.0, 3.0, 10.0]
    low, high = bootstrap_ends(sample, mean, resamples=500)
    assert 1.0 <= low < mean(sample) < high <= 10.0
    assert bootstrap_ends(sample, mean, resamples=500) == (low, high)


def test_one_value_says_nothing_about_chance() -> None:
    assert bootstrap_ends([3.0], mean, resamples=500) == (3.0, 3.0)
