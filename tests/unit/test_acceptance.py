"""What is believed of acceptance: models, what requests show, chance, and the length of outputs."""

import random
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.control.acceptance import ConstantAcceptance, PromisedAcceptance
from foretoken.control.learned import acceptance as learned_acceptance
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.lengths import OutputLengths
from foretoken.control.learned.spread import Spread
from foretoken.control.learned.trials import FADE


@given(st.floats(0.0, 1.0), st.integers(0, 16))
def test_a_length_is_one_and_the_sum_of_survival(alpha: float, k: int) -> None:
    model = ConstantAcceptance(alpha)
    assert model.length(k) == pytest.approx(sum(alpha**i for i in range(k + 1)))


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_chance_and_length_are_inverse(alpha: float, k: int) -> None:
    found = ConstantAcceptance.of_length(ConstantAcceptance(alpha).length(k), k)
    assert found.alpha == pytest.approx(alpha, abs=1e-6)


@pytest.mark.parametrize("seed", [0, 1, 3])
def test_no_more_is_expected_than_there_are_drafts(seed: int) -> None:
    """Of a request whose drafts are accepted more often or more rarely."""
    model = PromisedAcceptance()
    model.begin("r")
    for step in range(40):
        model.observe("r", "d", float(1 + step % 5), (step * seed) % (2 + step % 5))
    for count in (1, 7):
        assert 0.0 <= model.expected("r", "d", float(count), count) <= count


def test_promises_are_believed_by_what_came_of_their_size() -> None:
    model = PromisedAcceptance()
    model.begin("r")
    for _ in range(200):
        model.observe("r", "d", 1.0, 0)
        model.observe("r", "d", 12.0, 12)
    assert model.expected("new", "d", 1.0, 1) < 0.2
    assert model.expected("new", "d", 12.0, 12) > 11
    assert model.expected("new", "another", 12.0, 12) == pytest.approx(0.7 * 12)


def test_a_request_is_told_apart_and_forgotten() -> None:
    model = PromisedAcceptance()
    for request_id in ("good", "bad"):
        model.begin(request_id)
    for _ in range(60):
        model.observe("good", "d", 4.0, 4)
        model.observe("bad", "d", 4.0, 0)
    good, usual, bad = (model.expected(name, "d", 4.0, 4) for name in ("good", "new", "bad"))
    assert good > usual > bad
    model.release("bad")
    model.observe("bad", "d", 4.0, 0)  # its last step, told after its end
    assert model.expected("bad", "d", 4.0, 4) == model.expected("new", "d", 4.0, 4)


DRAFTER = "head"


def model(prior: float = 0.6) -> LearnedAcceptance:
    found = LearnedAcceptance({DRAFTER: prior})
    found.begin("r", "c")
    return found


def accepted(rng: np.random.Generator, chances: list[float]) -> int:
    refused = np.flatnonzero(rng.random(len(chances)) >= chances)
    return int(refused[0]) if len(refused) else len(chances)


def first(found: LearnedAcceptance, request_id: str = "r") -> float:
    return float(found.chances([request_id], DRAFTER, 1)[0, 0])


def test_planted_chances_are_recovered() -> None:
    """Deep drafts are reached rarely: accepted over drafted would say 0.36, 0.23, ..."""
    planted = [0.9, 0.7, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3]
    found, rng = model(), np.random.default_rng(0)
    for i in range(20):
        found.begin(f"r{i}", "c")
    sums = np.zeros(8)
    for step in range(3000):
        found.observe(f"r{step % 20}", DRAFTER, 8, accepted(rng, planted))
        sums += found.chances([f"r{step % 20}"], DRAFTER, 8)[0] / 3000
    found.begin("new", "c")
    learnt = found.chances(["new"], DRAFTER, 8)[0]
    assert learnt[:4] == pytest.approx(planted[:4], abs=0.06)
    assert learnt[4:] == pytest.approx(planted[4:], abs=0.1)
    assert sums[:2] == pytest.approx(planted[:2], abs=0.06)


def test_what_was_not_reached_is_no_trial() -> None:
    """A draft that fails at once says nothing of deeper ones, and one kept whole has no failure."""
    found, other = model(), model()
    for _ in range(30):
        found.observe("r", DRAFTER, 4, 4)
        other.observe("r", DRAFTER, 2, 2)
        other.observe("r", DRAFTER, 2, 1)
    assert found.chances(["r"], DRAFTER, 4)[0].min() > 0.9
    # Depth 1 always stays and depth 2 does half of the time; pooled, both would be at 0.75.
    assert other.chances(["r"], DRAFTER, 2)[0] == pytest.approx([1.0, 0.5], abs=0.1)


def test_few_trials_are_drawn_to_the_class_and_the_class_to_the_usual() -> None:
    found = model(0.7)
    assert found.chances(["r"], DRAFTER, 8) == pytest.approx(np.full((1, 8), 0.7))
    assert found.chances(["r"], "unknown", 2) == pytest.approx(np.full((1, 2), 0.5))
    found.observe("r", DRAFTER, 1, 0)
    assert 0.5 < first(found) < 0.65
    for _ in range(300):
        found.observe("r", DRAFTER, 1, 0)
    found.begin("next", "c")
    found.begin("stranger", "d")
    assert first(found) < 0.01
    assert first(found, "next") < 0.05
    # A class of which nothing is known is taken for the others, as far as they were tried.
    assert first(found, "next") < first(found, "stranger") < 0.3


def test_doubt_is_large_where_requests_differ_and_falls_with_what_one_shows() -> None:
    def after(*chances: float) -> LearnedAcceptance:
        """Requests of these chances have ended; one of the same class has just begun."""
        model, draw = LearnedAcceptance({"draft": 0.6}), random.Random(1)
        for number, chance in enumerate(chances * 20):
            model.begin(str(number), "")
            for _ in range(40):
                model.observe(str(number), "draft", 1, int(draw.random() < chance))
            model.release(str(number))
        model.begin("new", "")
        return model

    alike, apart = after(0.6), after(0.2, 0.95)
    ids = ["new"]
    assert alike.doubt(ids, "draft")[0] > 0.8
    assert apart.doubt(ids, "draft")[0] < 0.65
    before = apart.doubt(ids, "draft")[0]
    for accepted in [1, 1, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1]:
        apart.observe("new", "draft", 1, accepted)
    assert apart.doubt(ids, "draft")[0] > before + 0.1


def test_a_request_that_is_better_early_is_taken_to_be_so_deeper() -> None:
    found, rng = model(), np.random.default_rng(0)
    for _ in range(500):
        found.observe("r", DRAFTER, 4, accepted(rng, [0.3] * 4))
    found.begin("good", "c")
    before = found.chances(["good"], DRAFTER, 4)[0]
    for _ in range(20):
        found.observe("good", DRAFTER, 1, 1)
    after = found.chances(["good"], DRAFTER, 4)[0]
    assert before.max() < 0.45
    assert after[0] > 0.8
    assert after[3] > 0.6


def test_a_tree_counts_by_the_depth_of_its_branch() -> None:
    """Seven nodes on three levels: the depth is what is drafted, not the nodes."""
    found = model()
    for _ in range(60):
        found.observe("r", DRAFTER, 3, 3)
    assert found.chances(["r"], DRAFTER, 3)[0].min() > 0.9


def test_many_requests_have_the_chances_that_each_has_alone() -> None:
    found, rng = LearnedAcceptance({DRAFTER: 0.6}), np.random.default_rng(0)
    names = [f"r{i}" for i in range(40)]
    for i, name in enumerate(names[:30]):
        found.begin(name, f"c{i % 3}")
        for _ in range(i):
            found.observe(name, DRAFTER, 6, accepted(rng, [0.02 * i + 0.3] * 6))
    together = found.chances(names, DRAFTER, 12)
    alone = np.concatenate([found.chances([name], DRAFTER, 12) for name in names])
    assert together.shape == (40, 12)
    assert together == pytest.approx(alone)
    assert ((together > 0) & (together < 1)).all()
    assert found.chances([], DRAFTER, 3).shape == (0, 3)


def test_released_requests_leave_no_memory() -> None:
    found = model()
    found.observe("r", DRAFTER, 2, 1)
    rows = found._rows.in_use
    for i in range(1000):
        found.begin(f"x{i}", "c")
        found.observe(f"x{i}", DRAFTER, 2, 1)
        found.release(f"x{i}")
        found.observe(f"x{i}", DRAFTER, 2, 1)  # its last step, told after its end
    assert found._rows.in_use == rows
    assert len(found._class_keys) == 1
    assert found.describe()[DRAFTER]["c"]["requests"] == 1


def test_classes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learned_acceptance, "MOST_CLASSES", 8)
    found = model()
    found.observe("r", DRAFTER, 2, 1)
    for i in range(50):
        found.begin("x", f"tenant {i}")
        found.observe("x", DRAFTER, 2, 1)
        found.release("x")
    classes = found.describe()[DRAFTER]
    assert isinstance(classes, dict)
    assert len(classes) == 8
    assert {"c", "tenant 49"} <= classes.keys()  # those with requests stay


def test_look_ups_are_believed_by_what_came_of_their_promises() -> None:
    found = PromisedAcceptance()
    found.begin("r")
    for _ in range(100):
        found.observe("r", "ngram", 4.0, 0)
    assert found.expected("r", "ngram", 4.0, 4) < 0.4
    assert found.expected("new", "suffix", 4.0, 4) == pytest.approx(0.7 * 4)


def test_what_a_class_showed_is_known_when_its_requests_have_ended() -> None:
    """What a trial told is asked for when it is over, and some of its requests may be too."""
    found = model()
    for _ in range(30):
        found.observe("r", DRAFTER, 2, 1)
    found.release("r")
    assert found.seen(["c", "c"], DRAFTER) == 30
    assert found.seen(["c", "new"], DRAFTER) == 0
    assert found.describe()[DRAFTER].keys() == {"c", "new"}


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


def left(lengths: OutputLengths, class_key: str, num_output: int, most: int) -> float:
    return float(lengths.remaining([class_key], np.array([num_output]), np.array([most]))[0])


def test_of_an_unknown_class_one_knows_how_long_it_lasted() -> None:
    lengths = OutputLengths()
    assert left(lengths, "c", 0, 1000) == 32
    assert left(lengths, "c", 200, 1000) == 200
    assert left(lengths, "c", 200, 50) == 50


def test_ended_outputs_tell_how_long_the_next_will_be() -> None:
    lengths = OutputLengths()
    for _ in range(200):
        lengths.ended("short", 20)
        lengths.ended("long", 400)
    assert left(lengths, "short", 5, 1000) == pytest.approx(15, rel=0.1)
    assert left(lengths, "long", 100, 1000) == pytest.approx(300, rel=0.02)
    # Longer than all before it: nothing is known but that it lasts.
    assert left(lengths, "short", 60, 1000) == 60


@pytest.mark.parametrize("num_output", [0, 50, 150])
def test_residual_life_is_that_of_the_law(num_output: int) -> None:
    """Geometric outputs have the same mean left whatever they wrote."""
    rng = np.random.default_rng(0)
    lengths = OutputLengths()
    for length in rng.geometric(0.01, 256):
        lengths.ended("c", int(length))
    assert left(lengths, "c", num_output, 10_000) == pytest.approx(100, rel=0.25)


def test_cut_outputs_count_as_longer() -> None:
    """Of 64 that began together the short ones end first; their mean would say 20."""
    rng = np.random.default_rng(1)
    pooled, cut = OutputLengths(), OutputLengths()
    drawn = [int(length) for length in rng.geometric(0.01, 256)]
    for length in drawn:
        for each in (pooled, cut):
            if length <= 40:
                each.ended("c", length)
        if length > 40:
            cut.ended("c", 40, cut=True)
    truth = 100.0
    assert left(pooled, "c", 0, 10_000) < 0.3 * truth
    assert left(cut, "c", 0, 10_000) > 0.5 * truth


def test_outputs_that_their_limit_cut_tell_how_long_others_last() -> None:
    lengths = OutputLengths()
    for _ in range(50):
        lengths.ended("c", 64, cut=True)
    # None of them ended before 64 tokens: one with the same limit will get there too.
    assert left(lengths, "c", 4, 60) == 60
    assert left(lengths, "c", 4, 1000) == pytest.approx(60 + 64, rel=0.1)


def test_many_are_asked_for_at_once() -> None:
    lengths = OutputLengths()
    for length in range(10, 60):
        lengths.ended("a", length)
        lengths.ended("b", 3 * length)
    classes, outputs, most = ["a", "b", "c", "a", "b"], [3, 100, 7, 80, 20], [100, 100, 5, 100, 7]
    found = lengths.remaining(classes, np.array(outputs), np.array(most))
    one_by_one = [left(lengths, *each) for each in zip(classes, outputs, most, strict=True)]
    assert found.tolist() == pytest.approx(one_by_one)


def test_classes_of_lengths_do_not_pile_up() -> None:
    lengths = OutputLengths()
    for i in range(2000):
        lengths.ended(f"tenant {i}", 5)
    assert len(lengths._classes) == 256
