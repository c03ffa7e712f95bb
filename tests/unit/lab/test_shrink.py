"""Noise taken out of per-request acceptance: the true spread comes back."""

import numpy as np

from foretoken.lab.stats.shrinkage import request_quantiles
from foretoken.lab.stats.simulator import DraftLaw, draw_accepted


def moments(steps_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Means, numbers of steps and step variances of requests."""
    n, steps = steps_NS.shape
    return steps_NS.mean(axis=1), np.full(n, float(steps)), steps_NS.var(axis=1, ddof=1)


def test_alike_requests_get_alike_rates() -> None:
    """The noise-only P10 of decision rules: 0.42 measured where every request has 0.54."""
    rng = np.random.default_rng(0)
    law = DraftLaw(k=5, alpha=0.8, concentration=float("inf"))
    means, steps, within = moments(draw_accepted(law, 400, 14, rng))
    raw_p10 = float(np.quantile(means, 0.1)) / 5
    (p10,) = request_quantiles(means, steps, within, (0.1,))
    assert raw_p10 < 0.45
    assert 0.50 < p10.estimate / 5 < 0.56
    assert p10.high / 5 > 0.53


def test_intervals_of_p10_cover() -> None:
    rng = np.random.default_rng(2)
    covered = 0
    for seed in range(40):
        truth = rng.normal(2.5, 0.5, 150)
        steps = rng.integers(10, 40, 150).astype(float)
        means = truth + rng.normal(0, np.sqrt(2.0 / steps))
        (p10,) = request_quantiles(means, steps, np.full(150, 2.0), (0.1,), seed=seed)
        covered += p10.low <= 2.5 - 1.2816 * 0.5 <= p10.high
    assert covered >= 34, covered


def test_few_requests_have_no_interval() -> None:
    (p10,) = request_quantiles(np.ones(3), np.ones(3), np.full(3, np.nan), (0.1,))
    assert p10.estimate == 1.0 and not p10.known
