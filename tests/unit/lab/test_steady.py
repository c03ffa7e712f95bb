"""Warm-up and drift."""

import numpy as np

from foretoken.lab.analysis.summary import _steady
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.steady import is_steady, measure_drift, warm_up_length


def test_a_slow_start_is_cut_off() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(10.0, 1.0, 200)
    values[:30] += np.linspace(20.0, 3.0, 30)
    assert 25 <= warm_up_length(values) <= 60


def test_nothing_is_cut_off_without_need() -> None:
    rng = np.random.default_rng(0)
    cuts = [warm_up_length(rng.normal(10.0, 1.0, 200)) for _ in range(40)]
    assert np.median(cuts) <= 20
    assert warm_up_length(np.ones(8)) == 0


def test_a_growing_queue_is_not_steady() -> None:
    rng = np.random.default_rng(0)
    growing = np.linspace(1.0, 5.0, 300) + rng.normal(0, 0.3, 300)
    assert not is_steady(growing)
    assert measure_drift(growing).change > 0.5


def test_the_ends_of_a_closed_loop_are_no_drift() -> None:
    """The first eight requests wait for each other's prompts, the last eight have room."""
    course = [0.45] * 8 + [0.30] * 24 + [0.20] * 8
    records = [
        RequestRecord(index=n, block=block, scheduled_s=n * 0.05, last_s=n * 0.05 + seconds)
        for block in range(9)
        for n, seconds in enumerate(course)
    ]
    assert _steady(records, 8)
    assert not _steady(records, 0)


def test_noise_is_steady() -> None:
    rng = np.random.default_rng(0)
    assert sum(is_steady(rng.lognormal(0, 0.5, 200)) for _ in range(100)) >= 97
    assert is_steady(np.ones(3))
