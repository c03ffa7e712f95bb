"""Per-request acceptance with its sampling noise taken out.

A request of 50 tokens has some ten verifications; its measured rate scatters even if every request
is alike, and the measured P10 is then mostly noise. The model here: a request's accepted drafts
per step are its own mean plus noise, the means differ between requests by `between`, and the noise
of a mean of n steps has variance within / n (DerSimonian and Laird 1986). Quantiles are taken over
estimates whose spread is that of the true means (constrained estimates, Louis 1984, Ghosh 1992).

Intervals draw requests again. Percentiles of what is drawn are too narrow for the tails of few
requests, so an interval is those and Student's around the estimate, together. A spread is not told
from none where resamples have both; then what all requests have in common is part of it too.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.lab.stats.intervals import (
    LEVEL,
    Floats,
    Interval,
    quantile,
    student_quantile,
    unknown,
)

RESAMPLES = 1000
FEWEST_REQUESTS = 5
TAIL = (1 - LEVEL) / 2


class _Fit(NamedTuple):
    """The model fitted to rows of requests."""

    quantiles_RQ: Floats
    center_R: Floats
    """What requests have in common."""
    between_R: Floats
    """Variance of the true means; below 0 where there is less of it than noise explains."""


def request_quantiles(
    means_N: Floats, steps_N: Floats, within_N: Floats, qs: tuple[float, ...], *, seed: int = 0
) -> tuple[Interval, ...]:
    """Quantiles over requests of their true means, with intervals that draw requests again.
    `means_N` are accepted drafts per step, `within_N` the variances of a request's steps (NaN:
    unknown). Fewer than five requests give estimates with unknown ends."""
    size = means_N.size
    if size < FEWEST_REQUESTS:
        raw = [quantile(means_N, q) for q in qs]
        return tuple(unknown(value) for value in raw)
    sample = (means_N, steps_N, within_N)
    picks_RN = np.random.default_rng(seed).integers(0, size, (RESAMPLES, size))
    found, drawn = _fit(sample, np.arange(size)[None], qs), _fit(sample, picks_RN, qs)
    # Less spread than noise explains is none.
    points_Q = found.quantiles_RQ[0] if found.between_R[0] > 0 else found.center_R.repeat(len(qs))
    low_Q, high_Q = np.quantile(drawn.quantiles_RQ, [TAIL, 1 - TAIL], axis=0)
    half_Q = _half_width(drawn.quantiles_RQ, size)
    low_Q = np.minimum(low_Q, points_Q - half_Q)
    high_Q = np.maximum(high_Q, points_Q + half_Q)
    if np.quantile(drawn.between_R, TAIL) <= 0:
        half = _half_width(drawn.center_R, size)
        low_Q = np.minimum(low_Q, found.center_R - half)
        high_Q = np.maximum(high_Q, found.center_R + half)
    return tuple(
        Interval(float(point), float(low), float(high))
        for point, low, high in zip(points_Q, low_Q, high_Q, strict=True)
    )


def _half_width(drawn_R: Floats, size: int) -> Floats:
    """Half of Student's interval; resamples scatter a little less than fresh requests would."""
    error: Floats = drawn_R.std(axis=0, ddof=1) * np.sqrt(size / (size - 1))
    return student_quantile(1 - TAIL, size - 1) * error


def _fit(
    sample: tuple[Floats, Floats, Floats], picks_RN: NDArray[np.int64], qs: tuple[float, ...]
) -> _Fit:
    means, steps, within = (values[picks_RN] for values in sample)
    dof = np.where(np.isfinite(within), steps - 1.0, 0.0)
    total, dofs = steps.sum(axis=1), np.maximum(dof.sum(axis=1), 1e-12)
    noise_R = (np.where(dof > 0, within, 0.0) * dof).sum(axis=1) / dofs
    mean_R = (means * steps).sum(axis=1) / total
    scatter_R = (steps * (means - mean_R[:, None]) ** 2).sum(axis=1)
    slack_R = np.maximum(total - (steps**2).sum(axis=1) / total, 1e-12)
    between_R = (scatter_R - noise_R * (means.shape[1] - 1)) / slack_R
    noise = noise_R[:, None] / steps
    weights = 1.0 / np.maximum(np.maximum(between_R, 0.0)[:, None] + noise, 1e-12)
    center_R = (means * weights).sum(axis=1) / weights.sum(axis=1)
    # Below no spread the order turns round: what is drawn then scatters on both sides of none,
    # instead of being none half of the time.
    size = np.abs(between_R)[:, None]
    share = np.where(size + noise > 0, size / np.maximum(size + noise, 1e-300), 1.0)
    turned_R1 = np.where(between_R < 0, -1.0, 1.0)[:, None]
    guesses = center_R[:, None] + turned_R1 * np.sqrt(share) * (means - center_R[:, None])
    # Plain interpolation draws the tails of few requests towards the middle.
    quantiles_QR: Floats = np.quantile(guesses, list(qs), axis=1, method="median_unbiased")
    return _Fit(quantiles_QR.T, center_R, between_R)
