"""What deciding takes more where somebody drafts counts against drafts, once both are known."""

import pytest

from foretoken.control.adaptive.deciding_share import DecidingShare


def _noted(plain_us: float, drafted_us: float, steps: int = 400) -> DecidingShare:
    share = DecidingShare()
    for _ in range(steps):
        share.note(plain_us * 1e-6, 1e-3, drafts=False)
        share.note(drafted_us * 1e-6, 1e-3, drafts=True)
    return share


def test_the_difference_of_shares() -> None:
    """Of steps of 1 ms, 50 us with drafts and 10 us without are 4 %."""
    assert _noted(10, 50).of_drafts == pytest.approx(0.04)


def test_drafts_are_not_praised_for_it() -> None:
    """Deciding that takes less with drafts than without brings them nothing."""
    assert _noted(50, 10).of_drafts == 0.0


def test_nothing_before_both_are_known() -> None:
    """A fifth of a second of each."""
    assert _noted(0, 50, steps=150).of_drafts == 0.0
    share = DecidingShare()
    for _ in range(1000):
        share.note(50e-6, 1e-3, drafts=True)
    assert share.of_drafts == 0.0


def test_what_was_long_ago_counts_little() -> None:
    """Ten seconds of steps later the share is what it is now."""
    share = _noted(10, 50)
    for _ in range(10_000):
        share.note(10e-6, 1e-3, drafts=False)
        share.note(15e-6, 1e-3, drafts=True)
    assert share.of_drafts == pytest.approx(0.005, abs=0.004)
