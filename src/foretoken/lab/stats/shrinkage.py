"""Per-request acceptance with its sampling noise taken out.

A request of 50 tokens has some ten verifications; its measured rate scatters even if every request
is alike, and the measured P10 is then mostly noise. The model here: a request's accepted drafts
per step are its own mean plus noise, the means differ between requests by `between`, and the noise
of a mean of n steps has variance within / n (DerSimonian and Laird 1986). Quantiles are taken over
estimates whose spread is that of the true means (constrained estimates, Louis 1984, Ghosh 1992).
"""

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import LEVEL, Floats, Interval, quantile, unknown

RESAMPLES = 1000
FEWEST_REQUESTS = 5


def request_quantiles(
    means_N: Floats,
    steps_N: Floats,
    within_N: Floats,
    qs: tuple[float, ...],
    *,
    seed: int = 0,
) -> tuple[Interval, ...]:
    """Quantiles over requests of their true means, with intervals that draw requests again."""
    if means_N.size < FEWEST_REQUESTS:
        raw = [quantile(means_N, q) for q in qs]
        return tuple(unknown(value) for value in raw)
    rows_1N = np.arange(means_N.size)[None]
    picks_RN = np.random.default_rng(seed).integers(0, means_N.size, (RESAMPLES, means_N.size))
    points_Q = _row_quantiles((means_N, steps_N, within_N), rows_1N, qs)[0]
    drawn_RQ = _row_quantiles((means_N, steps_N, within_N), picks_RN, qs)
    low_Q, high_Q = np.quantile(drawn_RQ, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return tuple(
        Interval(float(point), min(float(low), float(point)), max(float(high), float(point)))
        for point, low, high in zip(points_Q, low_Q, high_Q, strict=True)
    )


def _row_quantiles(
    sample: tuple[Floats, Floats, Floats], picks_RN: NDArray[np.int64], qs: tuple[float, ...]
) -> Floats:
    """Fit the model to every row of picked requests; quantiles of its estimates, (R, Q)."""
    means, steps, within = (values[picks_RN] for values in sample)
    dof = np.where(np.isfinite(within), steps - 1.0, 0.0)
    total, dofs = steps.sum(axis=1), np.maximum(dof.sum(axis=1), 1e-12)
    noise_R = (np.where(dof > 0, within, 0.0) * dof).sum(axis=1) / dofs
    mean_R = (means * steps).sum(axis=1) / total
    scatter_R = (steps * (means - mean_R[:, None]) ** 2).sum(axis=1)
    slack_R = np.maximum(total - (steps**2).sum(axis=1) / total, 1e-12)
    spread_R = np.maximum(0.0, (scatter_R - noise_R * (means.shape[1] - 1)) / slack_R)
    whole = spread_R[:, None] + noise_R[:, None] / steps
    weights = 1.0 / np.maximum(whole, 1e-12)
    center_R1 = ((means * weights).sum(axis=1) / weights.sum(axis=1))[:, None]
    share = np.where(whole > 0, spread_R[:, None] / np.maximum(whole, 1e-300), 1.0)
    guesses = center_R1 + np.sqrt(share) * (means - center_R1)
    quantiles_QR: Floats = np.quantile(guesses, list(qs), axis=1)
    return quantiles_QR.T
