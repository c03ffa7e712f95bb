"""How long an output will still be: those that were cut count as longer than they are."""

import numpy as np
import pytest

from foretoken.control.learned.lengths import OutputLengths


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


def test_classes_do_not_pile_up() -> None:
    lengths = OutputLengths()
    for i in range(2000):
        lengths.ended(f"tenant {i}", 5)
    assert len(lengths._classes) == 256
