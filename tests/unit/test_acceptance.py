"""The models of acceptance: one chance, promises and what came of them, a drafter's confidences."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.control.acceptance import (
    AcceptanceModel,
    ConfidenceAcceptance,
    ConstantAcceptance,
    PromisedAcceptance,
)


@given(st.floats(0.0, 1.0), st.integers(0, 16))
def test_a_length_is_one_and_the_sum_of_survival(alpha: float, k: int) -> None:
    model = ConstantAcceptance(alpha)
    assert model.length(k) == pytest.approx(1 + sum(model.survival("r", "d", k)))


@given(st.floats(0.01, 0.99), st.integers(1, 16))
def test_chance_and_length_are_inverse(alpha: float, k: int) -> None:
    found = ConstantAcceptance.of_length(ConstantAcceptance(alpha).length(k), k)
    assert found.alpha == pytest.approx(alpha, abs=1e-6)


def learnt(seed: int) -> PromisedAcceptance:
    """One request whose drafts are accepted more often or more rarely."""
    model = PromisedAcceptance()
    model.begin("r")
    for step in range(40):
        model.observe("r", "d", float(1 + step % 5), (step * seed) % (2 + step % 5))
    return model


@pytest.mark.parametrize(
    "model", [ConstantAcceptance(0.7), learnt(0), learnt(1), learnt(3), ConfidenceAcceptance()]
)
def test_survival_is_a_chance_and_never_rises(model: AcceptanceModel) -> None:
    for count in (0, 1, 7):
        found = model.survival("r", "d", count)
        assert len(found) == count
        assert all(0.0 <= chance <= 1.0 for chance in found)
        assert list(found) == sorted(found, reverse=True)


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
    assert model.knows("good", "d") and not model.knows("new", "d")
    good, usual, bad = (model.expected(name, "d", 4.0, 4) for name in ("good", "new", "bad"))
    assert good > usual > bad
    model.release("bad")
    model.observe("bad", "d", 4.0, 0)  # its last step, told after its end
    assert not model.knows("bad", "d")


def test_confidences_that_are_not_borne_out_are_trusted_less() -> None:
    model = ConfidenceAcceptance()
    for _ in range(100):
        model.observe(2.0, 0)
    assert model.trust == pytest.approx(0.1)
    model.saw([1.0] * 500)
    assert model.usual_chance > 0.95
