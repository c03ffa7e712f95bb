"""Quantiles, their intervals and the distributions they stand on."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.lab.stats.intervals import (
    binomial_cdf,
    normal_quantile,
    quantile_interval,
    share_interval,
    student_cdf,
    student_quantile,
)


@pytest.mark.parametrize(
    ("dof", "value"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (9, 2.26216)]
    + [(10, 2.22814), (30, 2.04227), (120, 1.97993)],
)
def test_student_quantiles_are_those_of_the_tables(dof: int, value: float) -> None:
    assert student_quantile(0.975, dof) == pytest.approx(value, rel=1e-5)
    assert student_quantile(0.025, dof) == pytest.approx(-value, rel=1e-5)
    assert student_cdf(value, dof) == pytest.approx(0.975, abs=1e-6)


def test_many_degrees_of_freedom_are_normal() -> None:
    assert student_quantile(0.9, 10_000) == normal_quantile(0.9)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_binomial_cdf_rises_to_one(n: int, p: float) -> None:
    cdf = binomial_cdf(n, p)
    assert cdf.shape == (n + 1,)
    assert (np.diff(cdf) >= -1e-12).all()
    assert cdf[-1] == pytest.approx(1.0)
    assert cdf[0] == pytest.approx((1 - p) ** n)


def test_the_median_of_nine_has_the_known_interval() -> None:
    interval = quantile_interval(np.arange(1.0, 10.0), 0.5)
    assert (interval.estimate, interval.low, interval.high) == (5.0, 2.0, 8.0)


def test_a_small_sample_has_no_p99() -> None:
    needed = 368
    few = quantile_interval(np.arange(needed - 1.0), 0.99)
    assert few.high == math.inf and not few.known
    assert quantile_interval(np.arange(float(needed)), 0.99).known


def test_quantile_intervals_cover() -> None:
    rng = np.random.default_rng(1)
    for q, n in ((0.5, 40), (0.9, 120), (0.99, 600)):
        truth = -math.log(1 - q)
        covered = 0
        for _ in range(400):
            interval = quantile_interval(rng.exponential(size=n), q)
            covered += interval.low <= truth <= interval.high
        assert covered / 400 >= 0.93, (q, n, covered / 400)


def test_share_intervals_stay_inside() -> None:
    assert share_interval(0, 20).low == 0.0
    assert share_interval(20, 20).high == 1.0
    assert share_interval(10, 20).estimate == 0.5
    assert not share_interval(0, 0).known
