"""How near two tokens may be: read off a server's own numbers."""

import numpy as np
import pytest

from foretoken.lab.audit.asking import Reply
from foretoken.lab.audit.rounding import (
    LEAST,
    MOST,
    MOST_MEASURED,
    divergence,
    near_tie,
    step_of,
)
from foretoken.lab.stats.intervals import Floats

PLACES, WORDS, TOPS = 4000, 40, 5


def rounded(values: Floats, bits: int) -> Floats:
    """To so many significant bits, ties to even."""
    parts, powers = np.frexp(values)
    found: Floats = np.ldexp(np.rint(np.ldexp(parts, bits)), powers - bits)
    return found


def two_runs(bits: int, size: float, noise: float = 0.0) -> tuple[Floats, Floats]:
    """Logits of the same places as two batches compute them: (PLACES, WORDS) each."""
    rng = np.random.default_rng(1)
    exact = size + rng.normal(0.0, 0.1 * size, (PLACES, WORDS))
    added = [rng.normal(0.0, noise, exact.shape) for _ in range(2)]
    one, two = (rounded(exact + own, bits) for own in added)
    return one, two


def likeliest(logits: Floats) -> list[list[float]]:
    """Log-probabilities of the likeliest tokens of each place, as numbers of 32 bit."""
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    tops: list[list[float]] = (-np.sort(-logs, axis=1)[:, :TOPS]).astype(np.float32).tolist()
    return tops


def apart(one: Floats, two: Floats) -> list[float]:
    """How far log-probabilities are from those of another time, at most in eight places each."""
    first, second = ([place[0] for place in likeliest(own)[:64]] for own in (one, two))
    each = [abs(a - b) for a, b in zip(first, second, strict=True)]
    return [max(each[at : at + 8]) for at in range(0, 64, 8)]


def turned(one: Floats, two: Floats) -> list[float]:
    """How far the likeliest two are apart where the other batch has another likeliest."""
    tops = -np.sort(-one, axis=1)[:, :2]
    other = one.argmax(axis=1) != two.argmax(axis=1)
    found: list[float] = (tops[other, 0] - tops[other, 1]).tolist()
    return found


@pytest.mark.parametrize(("size", "step"), [(6.0, 1 / 32), (12.0, 1 / 16), (24.0, 1 / 8)])
def test_the_step_of_bfloat16_is_that_of_the_logits_size(size: float, step: float) -> None:
    one, _ = two_runs(8, size)
    assert step_of(likeliest(one)[:8]) == step
    assert near_tie(likeliest(one)[:8]) == max(LEAST, 2 * step)


def test_what_bfloat16_turns_is_excused_and_no_more() -> None:
    one, two = two_runs(8, 24.0, noise=0.01)
    gaps = turned(one, two)
    width = near_tie(likeliest(one)[:8], apart(one, two))
    assert len(gaps) > 20 and max(gaps) > LEAST, "0.02 would accuse a right server"
    assert max(gaps) <= width == 0.25


def test_numbers_of_32_bit_stay_narrow() -> None:
    one, two = two_runs(24, 24.0)
    assert step_of(likeliest(one)[:8]) == 0.0
    assert near_tie(likeliest(one)[:8], apart(one, two)) == LEAST
    half, _ = two_runs(11, 24.0)
    assert near_tie(likeliest(half)[:8]) == pytest.approx(2 / 64)


def test_without_a_grid_what_was_measured_counts() -> None:
    one, two = two_runs(24, 24.0, noise=0.03)
    gaps = turned(one, two)
    width = near_tie(likeliest(one)[:8], apart(one, two))
    assert LEAST < width <= MOST_MEASURED
    assert sum(gap <= width for gap in gaps) >= 0.9 * len(gaps) > 0


def test_little_is_told_by_little() -> None:
    assert near_tie([]) == near_tie([[-0.1]]) == near_tie([[-0.1, -2.6]]) == LEAST
    assert near_tie([[-0.1, -0.6, -1.1, -1.6, -2.1]] * 8) == MOST


def told(*tops: dict[str, float]) -> Reply:
    """An answer of the likeliest tokens of each place."""
    tokens = tuple(max(place, key=lambda name: place[name]) for place in tops)
    return Reply(body={}, text="".join(tokens), tokens=tokens, tops=tops)


SURE_OF = {"a": -0.01, "o": -6.0, "e": -9.0}


@pytest.mark.parametrize(
    ("first", "other", "gap"),
    [
        ([SURE_OF, {"bc": -0.1, "d": -7.0}], "a!!", 6.9),
        ([SURE_OF, {"bc": -0.1, "d": -7.0}], "ad!", 6.9),
        ([SURE_OF, {"bc": -0.1, "bd": -0.3}], "abd", 0.2),
        # Another cut of the same beginning was nearly as likely.
        ([{"a": -0.5, "ab": -0.7, "e": -9.0}, {"bc": -0.1, "d": -7.0}], "ab!", None),
        ([{"a": -0.5, "x": -0.6}, {"bc": -0.1, "d": -7.0}], "a!!", None),
        # A part of a character may be what the other text begins with.
        ([SURE_OF, {"bc": -0.1, "\ufffd": -0.2, "d": -7.0}], "a\u7bc0", None),
        ([SURE_OF, {"bc": -0.1, "bytes:\\xe7": -0.2, "d": -7.0}], "a\u7bc0", None),
        ([SURE_OF, {"bc": -0.1, "d": -7.0}], "a", None),
        ([SURE_OF, {"bc": -0.1, "d": -7.0}], "abcd", None),
    ],
)
def test_a_text_is_at_least_as_unlikely_as_what_is_told(
    first: list[dict[str, float]], other: str, gap: float | None
) -> None:
    found = divergence(told(*first), Reply(body={}, text=other))
    assert found is not None
    assert found[0] is None if gap is None else found[0] == pytest.approx(gap)
