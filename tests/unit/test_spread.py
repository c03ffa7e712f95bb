"""How much requests of a class differ, learnt from what they show."""

from random import Random

import pytest

from foretoken.control.learned.spread import Spread
from foretoken.control.learned.trials import FADE


def add(spread: Spread, draw: Random, chance: float, trials: int) -> None:
    """A request with this chance ends, its trials faded as they are."""
    accepted = count = 0.0
    for _ in range(trials):
        accepted = FADE * accepted + (draw.random() < chance)
        count = FADE * count + 1.0
    spread.add(accepted, count, 0.5)


@pytest.mark.parametrize("weight", [4.0, 12.0, 30.0])
def test_the_weight_of_a_beta_prior_is_found(weight: float) -> None:
    found = []
    for seed in range(20):
        draw, spread = Random(seed), Spread()
        for _ in range(150):
            add(spread, draw, draw.betavariate(weight / 2, weight / 2), draw.randint(8, 60))
        found.append(spread.weight)
    assert sum(found) / 20 == pytest.approx(weight, rel=0.25)


def test_requests_that_are_all_alike_are_known_by_their_class() -> None:
    draw, spread = Random(1), Spread()
    for _ in range(150):
        add(spread, draw, 0.5, 40)
    assert spread.weight >= 36.0


def test_requests_that_accept_all_or_nothing_are_known_by_themselves() -> None:
    draw, spread = Random(1), Spread()
    for i in range(150):
        add(spread, draw, float(i % 2), 40)
    assert spread.weight == 3.0


def test_few_trials_say_nothing() -> None:
    spread = Spread()
    add(spread, Random(1), 1.0, 4)
    assert spread.weight == Spread().weight


def test_trials_of_one_request_say_much_the_same_where_requests_differ() -> None:
    """The design effect of clusters of m trials that correlate by r is 1 + (m - 1) r."""
    draw, alike, different, unknown = Random(1), Spread(), Spread(), Spread()
    for i in range(150):
        add(alike, draw, 0.5, 12)
        add(different, draw, float(i % 2), 12)
    assert unknown.repeats == 1.0
    assert alike.repeats == pytest.approx(1.0 + 11.0 / (alike.weight + 1.0), rel=0.01)
    assert different.repeats == pytest.approx(1.0 + 11.0 / 4.0, rel=0.01)


def test_a_class_of_long_requests_is_known_some_day() -> None:
    draw, spread = Random(1), Spread()
    for i in range(20):
        add(spread, draw, float(i % 2), 2000)
    assert spread.repeats == 4.0
