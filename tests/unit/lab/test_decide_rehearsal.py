"""What the default policy is worth on experiments whose truth is known."""

import pytest

from foretoken.lab.decide.rehearsal import SimulatedExperiment, play, rehearse
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.verdict import DO_NOT_SHIP, SHIP


def shares(speedup: float, restart_sd: float, experiments: int) -> dict[str, float]:
    """Share of experiments by verdict."""
    given = SimulatedExperiment(speedup=speedup, restart_sd=restart_sd)
    return rehearse(load_policy(None), given, range(experiments))


def test_a_gain_at_the_limit_is_hardly_ever_shipped() -> None:
    assert shares(1.30, 0.07, 150).get(SHIP, 0.0) <= 0.05


def test_a_gain_of_a_tenth_more_is_shipped() -> None:
    assert shares(1.43, 0.07, 150)[SHIP] >= 0.90


def test_a_small_gain_is_turned_down() -> None:
    assert shares(1.15, 0.07, 50)[DO_NOT_SHIP] >= 0.90


def test_one_asked_sample_is_enough() -> None:
    """SHIP at the first look or after the blocks that it asked for, not only in the end."""
    given = SimulatedExperiment(speedup=1.43)
    policy = load_policy(None)
    played = [play(policy, given, seed) for seed in range(100)]
    assert sum(p.verdict == SHIP and p.looks <= 2 for p in played) >= 90


@pytest.mark.full
@pytest.mark.parametrize("restart_sd", [0.03, 0.05, 0.07, 0.10])
def test_over_two_thousand_experiments(restart_sd: float) -> None:
    assert shares(1.30, restart_sd, 2000).get(SHIP, 0.0) <= 0.05
    assert shares(1.43, restart_sd, 2000)[SHIP] >= 0.90
