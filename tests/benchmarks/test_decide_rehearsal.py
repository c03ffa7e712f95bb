"""What intervals and the default policy are worth on experiments whose truth is known."""

from dataclasses import replace

import pytest

from benchmarks.simulate.ab_draws import LAWS, true_class_gain
from benchmarks.simulate.decide_rehearsal import (
    Played,
    SimulatedExperiment,
    measure_coverage,
    play,
    shares_of_ship,
)
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.verdict import LEAVE_IT_OFF, USE_IT

LIMIT, ABOVE = 1.3, 1.6
SPLIT = "one class loses"
URL = "URL arms"


def played(law: str, speedup: float, experiments: int) -> list[Played]:
    """Experiments under the default policy."""
    given = SimulatedExperiment(law=replace(LAWS[law], speedup=speedup))
    return [play(load_policy(None), given, seed) for seed in range(experiments)]


@pytest.mark.slow
@pytest.mark.parametrize("law", LAWS)
def test_intervals_cover_quick(law: str) -> None:
    """A part of the full test; bounds are what chance allows around 93 to 97 %."""
    assert 0.88 <= measure_coverage(SimulatedExperiment(law=LAWS[law]), "tpot_p50", 150).share


@pytest.mark.slow
@pytest.mark.parametrize("law", ["base", URL])
def test_a_gain_at_the_limit_is_hardly_ever_shipped(law: str) -> None:
    """Every look taken; arms by URL shipped it in 24 % once, when blocks passed for starts."""
    assert shares_of_ship(played(law, LIMIT, 60))[1] <= 0.10


@pytest.mark.slow
def test_a_true_gain_is_shipped_for_the_sample_that_it_asks_for() -> None:
    """With the P99 of the first token as a must, none of them was."""
    assert shares_of_ship(played("base", ABOVE, 40))[1] >= 0.90


@pytest.mark.slow
def test_a_class_that_loses_is_named_with_what_to_do() -> None:
    """Though half of all requests gain 1.6 times or more."""
    law = replace(LAWS[SPLIT], speedup=ABOVE)
    assert true_class_gain(law, "creative") == pytest.approx(0.81, abs=0.01)
    for one in played(SPLIT, ABOVE, 20):
        assert one.verdict == LEAVE_IT_OFF
        assert "split the traffic: loses beside the others: creative" in one.sentence


@pytest.mark.slow
def test_a_small_gain_is_turned_down() -> None:
    found = played("base", 1.1, 20)
    assert sum(p.verdict == LEAVE_IT_OFF for p in found) >= 18


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("law", LAWS)
def test_intervals_cover(law: str) -> None:
    """95 % intervals of median, mean and P95 hold the truth in 93 to 97 % of 1,500 experiments."""
    given = SimulatedExperiment(law=LAWS[law])
    for metric in ("tpot_p50", "tpot_mean", "tpot_p95", "ttft_p95"):
        share = measure_coverage(given, metric, 1500).share
        assert 0.925 <= share, (metric, share)
        assert share <= 0.975 or law == URL, (metric, share)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("law", LAWS)
def test_verdicts_over_many_experiments(law: str) -> None:
    """False USE_IT at the limit at the first look and over all, and USE_IT at a true 1.6x."""
    first, ever = shares_of_ship(played(law, LIMIT, 1500))
    assert first <= 0.05 and ever <= 0.05
    above = played(law, ABOVE, 1500)
    if law == SPLIT:
        assert not any(p.verdict == USE_IT for p in above)
        assert sum("creative" in p.sentence for p in above) >= 0.95 * len(above)
    elif law != URL:
        assert shares_of_ship(above)[1] >= 0.90
