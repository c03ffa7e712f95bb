"""Trials of drafters, on a virtual clock: what they may cost, and that nobody is forgotten."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.control.learned.acceptance import LearnedAcceptance
from tests.unit.control_fakes import Batch, World, running

_CASES = st.tuples(st.sampled_from((1, 3, 8, 24)), st.floats(0.0, 1.0), st.floats(0.005, 0.2))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(_CASES)
def test_the_account_is_never_overdrawn_by_more_than_one_trial(
    case: tuple[int, float, float],
) -> None:
    count, chance, row_s = case
    batch = Batch(World(row_s=row_s), lambda sequence, step: chance)
    sequences = [running(f"r{i}") for i in range(count)]
    spent = largest = 0.0
    for _ in range(400):
        batch.step(sequences)
        facts = batch.control.facts()
        largest, spent = max(largest, facts["trials_s"] - spent), facts["trials_s"]
        assert facts["account_s"] >= -largest - 1e-9
    plain_s = batch.world.target_s(count)
    assert spent <= 8.0 * plain_s + 0.01 * batch.clock + largest


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("chance", [0.0, 0.2])
def test_a_drafter_at_rest_is_tried_again_within_a_bounded_number_of_steps(
    count: int, chance: float
) -> None:
    batch = Batch(World(), lambda sequence, step: chance)
    sequences = [running(f"r{i}") for i in range(count)]
    batch.run(sequences, 2000)
    drafted = [step for step, lengths in enumerate(batch.lengths) if any(lengths)]
    assert max(np.diff([*drafted, 2000])) <= 600


def test_a_drafter_that_cannot_pay_is_not_tried() -> None:
    batch = Batch(World(knee=4, knee_s=2.0), lambda sequence, step: 1.0)
    batch.run([running(f"r{i}") for i in range(4)], 300)
    assert not any(map(any, batch.lengths))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.floats(0.0, 1.0), st.integers(0, 99))
def test_plans_and_trials_have_no_more_drafts_than_the_drafter_may_make(
    count: int, most: int, chance: float, seed: int
) -> None:
    world = World()
    world.random.seed(seed)
    batch = Batch(world, lambda sequence, step: chance, most=most)
    sequences = [running(f"r{i}", most=40 + 7 * i) for i in range(count)]
    while sequences:
        batch.step(sequences)
        assert all(0 <= length <= most for length in batch.lengths[-1])
        sequences = [one for one in sequences if one.num_output < one.request.max_tokens]


@pytest.mark.slow
def test_more_acceptance_never_means_fewer_drafts() -> None:
    def of(chance: float) -> Batch:
        return Batch(World(), lambda sequence, step: chance)

    drafts = []
    for chance in (0.0, 0.3, 0.6, 0.9):
        batch = of(chance)
        batch.run([running(f"r{i}") for i in range(4)], 600)
        drafts.append(sum(map(sum, batch.lengths[-200:])))
    assert drafts == sorted(drafts)


def test_a_class_that_rises_begins_anew_and_one_that_stays_does_not() -> None:
    acceptance = LearnedAcceptance({"draft": 0.7})
    for i in range(60):
        acceptance.begin(f"r{i}", "class")
        acceptance.observe(f"r{i}", "draft", 1, 0)
    acceptance.begin("new", "class")
    before = acceptance.chances(["new"], "draft", 1)[0, 0]
    acceptance.observe_trial("new", "draft", 2, 0)
    assert acceptance.rises(["class"], "draft") == [0.0]
    acceptance.observe_trial("new", "draft", 2, 2)
    after = acceptance.chances(["new"], "draft", 1)[0, 0]
    assert before < 0.2 < 0.6 < after
    assert math.isclose(acceptance.rises(["class"], "draft")[0], 0.0)


@pytest.mark.slow
def test_what_decides_is_known_before_a_draft_is_drawn() -> None:
    """Over every text that four words can make, plans agree as long as outcomes did."""

    def guessing(right: list[bool]) -> Batch:
        return Batch(World(), lambda sequence, step: float(right[step % 4]), most=2)

    plans: dict[tuple[tuple[bool, ...], ...], list[int]] = {}
    for text in range(4**4):
        words = [text >> 2 * place & 3 for place in range(4)]
        # A draft is right where the word is its own guess: 0.
        right = [word == 0 for word in words]
        batch = guessing(right)
        sequence = running("r")
        seen: list[tuple[bool, ...]] = []
        for step in range(4):
            batch.step([sequence])
            lengths = batch.lengths[-1]
            key = tuple(seen)
            assert plans.setdefault(key, lengths) == lengths
            seen.append(tuple([right[step]] * lengths[0]))
