"""What is best under known gains, and what visits make us believe of the gains."""

import itertools
import math

import numpy as np
import pytest

from foretoken.lab.tune.beliefs import Spreads, believe
from foretoken.lab.tune.search import best_setting, best_values, value_of, worth_measuring
from foretoken.lab.tune.settings import OFF, Question, Schedule, Setting, ranges_of
from foretoken.lab.tune.visits import Answered, LoadSeen, Visit, summarize_load

LENGTHS = (1, 2, 3, 5, 8)


def question(schedule: Schedule = "any", loads: tuple[int, ...] = (1, 8, 64)) -> Question:
    settings = [Setting(name, (k,)) for name in ("draft", "ngram") for k in LENGTHS]
    return Question(loads=loads, settings=(Setting("auto"), *settings), schedule=schedule)


@pytest.mark.parametrize("schedule", ["any", "falling", "one"])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_schedule_is_the_best_of_all(schedule: Schedule, seed: int) -> None:
    """Against a list of every schedule that the engine can be told."""
    asked = question(schedule)
    gains_SL = np.random.default_rng(seed).normal(-0.1, 0.3, (len(asked.settings), 3))
    best = 0.0
    for drafter in ("draft", "ngram"):
        for lengths in itertools.product((0, *LENGTHS), repeat=3):
            falls = all(a >= b for a, b in itertools.pairwise(lengths))
            if schedule == "one" and len(set(lengths)) > 1 or schedule == "falling" and not falls:
                continue
            value = value_of(asked, gains_SL[None], Setting(drafter, lengths))[0]
            best = max(best, float(value))
    best = max(best, float(gains_SL[0].mean()))
    found = best_setting(asked, gains_SL)
    assert found.value == pytest.approx(best)
    assert float(value_of(asked, gains_SL[None], found.setting)[0]) == pytest.approx(best)
    everything = np.ones(len(asked.settings), np.bool_)
    assert best_values(asked, gains_SL[None], everything)[0] == pytest.approx(best)


def test_nothing_is_better_than_a_loss() -> None:
    asked = question()
    assert best_setting(asked, np.full((len(asked.settings), 3), -0.01)).setting == OFF


def test_of_settings_that_are_alike_one_stays() -> None:
    asked = question("one")
    gains_DSL = np.full((50, len(asked.settings), 3), -0.5)
    gains_DSL[:, 3:5] = 0.4
    kept = worth_measuring(asked, gains_DSL, 0.005, at_most=11)
    assert kept.sum() == 1
    assert kept[3] or kept[4]


def test_names_say_lengths_by_load() -> None:
    assert [s.name for s in (OFF, Setting("auto"), Setting("ngram", (3,)))] == [
        "off", "auto", "ngram k=3"
    ]  # fmt: skip
    assert Setting("ngram", (5, 3, 0)).name == "ngram k=5/3/0"
    assert question().alike(Setting("ngram", (3, 3, 3))) == Setting("ngram", (3,))


def test_ranges_end_between_loads() -> None:
    assert ranges_of((5, 3, 0), (1, 8, 64)) == ((1, 2, 5), (3, 22, 3), (23, 4096, 0))
    assert ranges_of((3, 3, 1), (1, 2, 3)) == ((1, 2, 3), (3, 4096, 1))


def visit(setting: Setting, turn: int, paces: tuple[float, ...]) -> Visit:
    loads = zip((1, 8, 64), paces, strict=True)
    return Visit(
        setting=setting,
        turn=turn,
        loads=tuple(LoadSeen(load=n, pace_s=pace, requests=16) for n, pace in loads),
        seconds=60.0,
    )


def test_beliefs_come_to_what_is_measured() -> None:
    asked = question()
    plain = (0.01, 0.02, 0.05)
    visits = []
    for turn in range(6):
        luck = 1.0 + 0.01 * (-1) ** turn
        visits.append(visit(OFF, turn, tuple(luck * one for one in plain)))
        visits.append(visit(Setting("draft", (3,)), turn, (0.005, 0.02, 0.1)))
    found = believe(asked, visits)
    place = asked.settings.index(Setting("draft", (3,)))
    assert np.exp(found.mean_SL[place]) == pytest.approx([2.0, 1.0, 0.5], rel=0.03)
    # A neighbour that was never measured is expected to be alike, what has nothing to do with it
    # is not.
    near = asked.settings.index(Setting("draft", (5,)))
    far = asked.settings.index(Setting("ngram", (3,)))
    assert 1.4 < math.exp(found.mean_SL[near, 0]) < 2.1
    assert math.exp(found.mean_SL[far, 0]) == pytest.approx(1.0, abs=0.01)


def test_one_lucky_start_is_drawn_towards_its_neighbours() -> None:
    asked = question("one")
    visits = [visit(OFF, 1, (0.01, 0.01, 0.01))]
    for k in LENGTHS:
        lucky = 0.75 if k == 3 else 1.0
        visits.append(visit(Setting("draft", (k,)), 1, (0.01 * lucky,) * 3))
    found = believe(asked, visits, Spreads(start=0.1, noise=0.03))
    place = asked.settings.index(Setting("draft", (3,)))
    assert math.exp(found.mean_SL[place].mean()) < 1.2


def test_spreads_are_learnt() -> None:
    random = np.random.default_rng(3)
    asked = question()
    visits = []
    for turn in range(1, 12):
        for setting in (OFF, Setting("draft", (3,))):
            luck = math.exp(random.normal(0.0, 0.07))
            visits.append(visit(setting, turn, (0.01 * luck, 0.02 * luck, 0.03 * luck)))
    found = believe(asked, visits).spreads
    assert found.start in (0.05, 0.07, 0.1)
    assert found.noise <= 0.02


def test_one_hiccup_does_not_count_whole() -> None:
    answers = [Answered("chat", 1.0, 100)] * 9 + [Answered("chat", 60.0, 100)]
    seen = summarize_load(4, answers)
    assert seen.pace_s == pytest.approx((9 * 1.0 + 3.0) / 1000)
    assert seen.kinds == {"chat": pytest.approx(seen.pace_s)}
    assert summarize_load(4, [], failed=3).failed == 3


def test_two_requests_of_a_class_are_held_against_all() -> None:
    """The middle of two is no middle: one hiccup would stand for the class."""
    usual = [Answered("chat", 1.0, 100)] * 6
    seen = summarize_load(4, [*usual, Answered("long", 1.1, 100), Answered("long", 6.0, 100)])
    assert seen.kinds["long"] == pytest.approx((1.1 + 3.0) / 200)
