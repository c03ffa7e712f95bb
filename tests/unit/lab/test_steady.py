"""Warm-up and drift."""

import numpy as np

from foretoken.lab.analysis.summary import _steady
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.steady import is_steady, measure_drift, start_length, warm_up_length


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


def decaying(arm: str, extra: float, seed: int) -> list[RequestRecord]:
    """Eight blocks of forty requests, the first of which take longer by a share that decays."""
    rng = np.random.default_rng(seed)
    found = []
    for block in range(8):
        due = 0.0
        for place in range(40):
            tpot = 0.01 * (1 + extra * np.exp(-place / 6)) * rng.lognormal(0, 0.05)
            first, last = due + 0.1 * rng.lognormal(0, 0.1), due + 0.1 + 100 * tpot
            found.append(
                RequestRecord(index=40 * block + place, arm=arm, block=block, scheduled_s=due,
                              sent_s=due, first_s=first, last_s=last, output_tokens=101)
            )  # fmt: skip
            due = last
    return found


def test_a_slow_start_is_cut_from_both_arms_and_from_the_seconds() -> None:
    """Left in, it took 7 % off a gain and a fifth off the intervals' coverage."""
    records = decaying("off", 0.0, 0) + decaying("on", 0.5, 1)
    found = without_start(records)
    assert 10 <= found.cut <= 20 and f"first {found.cut} requests" in found.notes[0]
    left = [(r.arm, r.block, r.index) for r in found.records if not r.warm_up]
    assert len(left) == 2 * 8 * (40 - found.cut)
    assert {k[1:] for k in left if k[0] == "on"} == {k[1:] for k in left if k[0] == "off"}
    assert found.lost_s["on", 0] > found.lost_s["off", 0] > 10.0
    assert (
        sum(r.tpot_s for r in found.records if r.arm == "on" and not r.warm_up)
        / (8 * (40 - found.cut))
        < 0.0105
    )


def test_nothing_is_cut_where_nothing_is_slow() -> None:
    cuts = [without_start(decaying("off", 0.0, s) + decaying("on", 0.0, s + 50)).cut
            for s in range(20)]  # fmt: skip
    assert sum(cut == 0 for cut in cuts) >= 16 and max(cuts) <= 10
    assert start_length(np.zeros((3, 10))) == 0 and start_length(np.zeros((0, 0))) == 0
    assert start_length(np.zeros((3, 40))) == 0, "all alike"
