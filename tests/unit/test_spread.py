"""How much requests of a class differ, learnt from what they show."""

from random import Random

import pytest

from foretoken.control.learned.spread import Spread
from foretoken.control.learned.trials import FADE


def add(spread: Spread, draw: Random, chance: float, trials: int) -> None:
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
