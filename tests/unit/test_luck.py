"""What is chance in accepted drafts, and what is not."""

from random import Random

import numpy as np
import pytest

from foretoken.control.adaptive.allocation import Allocation, DraftOption
from foretoken.control.adaptive.luck import Expected, Luck, chances


def option(survival: list[list[float]], levels: list[int] | None = None) -> DraftOption:
    survival_NK = np.array(survival)
    count, most = survival_NK.shape
    return DraftOption(
        name="draft", survival_NK=survival_NK, depth_s=np.zeros(most + 1), slot_s=0.0,
        start_s=np.zeros(count), levels_K=None if levels is None else np.array(levels),
    )  # fmt: skip


def allocation(drafts: list[int], drafters: list[int], depth: int) -> Allocation:
    return Allocation(
        drafts_N=np.array(drafts), drafter_N=np.array(drafters), seconds=1.0, tokens=1.0,
        unguarded=1.0, depth=depth,
    )  # fmt: skip


def test_means_and_variances_are_those_of_chains() -> None:
    chance, random, counts = 0.7, Random(1), []
    for _ in range(40_000):
        accepted = 0
        while accepted < 3 and random.random() < chance:
            accepted += 1
        counts.append(accepted)
    survival = [[chance, chance**2, chance**3]]
    [found] = chances(allocation([3], [0], 3), [option(survival)])
    assert len(found) == 3
    assert found[-1].mean == pytest.approx(np.mean(counts), rel=0.02)
    assert found[-1].variance == pytest.approx(np.var(counts), rel=0.03)
    assert found[0] == pytest.approx((0.7, 0.21))


def test_who_draws_no_drafts_expects_none() -> None:
    found = chances(allocation([2, 0], [0, -1], 2), [option([[0.5, 0.25], [0.5, 0.25]])])
    assert len(found[0]) == 2
    assert found[1] == ()


def test_trees_vary_at_most_as_much_as_their_depth_lets_them() -> None:
    tree = option([[0.6, 0.3, 0.4]], levels=[1, 1, 2])
    [(found,)] = chances(allocation([3], [0], 2), [tree])
    assert found.mean == pytest.approx(1.3)
    assert found.variance == pytest.approx(1.3 * 0.7)


def test_as_many_as_expected_are_not_held_against_anybody() -> None:
    each = (Expected(0.5, 0.25), Expected(0.75, 0.69))
    random, bad = Random(2), 0
    for _ in range(400):
        luck = Luck()
        for _ in range(12):
            accepted = int(random.random() < 0.5)
            luck.add(1, accepted, each)
        bad += not luck.is_bad
    assert bad < 0.06 * 400


def test_drafts_that_are_never_accepted_are_no_bad_luck_for_long() -> None:
    luck, each = Luck(), (Expected(0.6, 0.24), Expected(0.96, 0.76))
    steps = 0
    while luck.is_bad:
        luck.add(2, 0, each)
        steps += 1
    assert 2 <= steps <= 5


def test_of_fewer_drafts_less_is_expected() -> None:
    luck, each = Luck(), (Expected(0.6, 0.24), Expected(0.96, 0.76))
    luck.add(1, 1, each)
    luck.add(0, 0, each)
    assert (luck.accepted, luck.mean, luck.variance) == (1, 0.6, 0.24)
