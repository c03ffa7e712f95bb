"""The running test of drawn tokens: seldom wrong, however often it is asked, and soon right."""

import numpy as np
import pytest

from foretoken.server.auditing.evidence import FairTokens


def run(given: np.ndarray, drawn: np.ndarray, logs: np.ndarray, error: float) -> FairTokens:
    test = FairTokens(error)
    for x, y in zip(given, drawn, strict=True):
        test.add(float(logs[x] - logs[y]))
        if test.failed:
            break
    return test


@pytest.mark.slow
def test_alike_tokens_are_seldom_accused() -> None:
    """400 tests of 2,000 tokens at 5%, asked after each token: 20 are allowed, and 33 happen to a
    test of exactly 5% once in 400 times."""
    rng = np.random.default_rng(0)
    accused = 0
    for _ in range(400):
        chances = rng.dirichlet(np.full(30, 0.2)) + 1e-9
        chances /= chances.sum()
        given, drawn = rng.choice(30, (2, 2000), p=chances)
        accused += run(given, drawn, np.log(chances), 0.05).failed
    assert accused <= 33


def test_a_share_of_unverified_drafts_is_found() -> None:
    """One token in five is a draft that nobody checked, in fifty contexts in turn."""
    rng = np.random.default_rng(1)
    for _ in range(5):
        test = FairTokens()
        logits_C30 = rng.normal(0, 2, (50, 30))
        other_C30 = 0.6 * logits_C30 + 0.8 * rng.normal(0, 2, (50, 30))
        for i in range(20_000):
            logits, other = logits_C30[i % 50], other_C30[i % 50]
            drafted = other if rng.random() < 0.2 else logits
            given = np.argmax(drafted + rng.gumbel(size=30))
            drawn = np.argmax(logits + rng.gumbel(size=30))
            test.add(float(logits[given] - logits[drawn]))
            if test.failed:
                break
        assert test.failed, test.evidence
        assert test.mean < 0


def test_one_token_proves_nothing() -> None:
    test = FairTokens()
    test.add(-50.0)
    assert not test.failed and 0.5 < test.evidence < 2.0
