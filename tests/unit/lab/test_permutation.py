"""The permutation test that compares draws, and Holm's correction."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.lab.stats.permutation import compare_samples, holm_rejects


@pytest.mark.slow
def test_the_permutation_test_keeps_its_level_and_has_power() -> None:
    rng = np.random.default_rng(0)

    def draw(chances: list[float]) -> list[str]:
        return [str(x) for x in rng.choice(4, 150, p=chances)]

    fair = [0.4, 0.3, 0.2, 0.1]
    alarms = sum(compare_samples([[draw(fair), draw(fair)]], seed=i)[2] < 0.05 for i in range(30))
    assert alarms <= 6
    distance, expected, p_value = compare_samples([[draw(fair), draw([0.1, 0.3, 0.2, 0.4])]])
    assert distance > 2 * expected
    assert p_value < 0.01


@pytest.mark.parametrize("same", [["a"] * 5, ["a", "b"]])
def test_equal_samples_are_no_evidence(same: list[str]) -> None:
    assert compare_samples([[same, same]])[2] == 1.0


@given(st.lists(st.floats(0.0001, 1.0), min_size=1, max_size=8), st.floats(0.01, 0.2))
def test_holm_is_between_bonferroni_and_none(p_values: list[float], error: float) -> None:
    rejected = holm_rejects(p_values, error)
    for p_value, no in zip(p_values, rejected, strict=True):
        assert not (no and p_value > error)
        assert no or p_value > error / len(p_values)
    assert sorted(p_values)[: sum(rejected)] == sorted(
        p for p, no in zip(p_values, rejected, strict=True) if no
    ), "the smallest ones"
