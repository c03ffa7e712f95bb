"""Intervals and quantiles of one sample: the ground the other statistics stand on.

Pure functions over numpy arrays; no files, no clocks, no global random state. Everything random
takes a seed. An interval that the sample cannot support has infinite ends, never a made-up one.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate between two ends; infinite or NaN where the sample says nothing."""

    estimate: float
    low: float
    high: float
    level: float = LEVEL
    unseen_sd: float = 0.0
    """Part of the width, as a standard deviation of the logarithm, that is a prior: what no number
    of blocks would show."""

    @property
    def known(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)


def as_share(found: Interval) -> Interval:
    """The interval of a share, which no end leaves; unknown ends stay so."""
    if not found.known:
        return found
    ends = {name: min(max(getattr(found, name), 0.0), 1.0) for name in ("estimate", "low", "high")}
    return replace(found, **ends)


def unknown(estimate: float = math.nan, level: float = LEVEL) -> Interval:
    return Interval(estimate, -math.inf, math.inf, level)


normal_quantile = NormalDist().inv_cdf


def student_cdf(t: float, dof: int) -> float:
    """Student's t distribution function for whole degrees of freedom. The finite sums of Abramowitz
    and Stegun (1964), 26.7.3 and 26.7.4."""
    assert dof >= 1, dof
    theta = math.atan(t / math.sqrt(dof))
    sine, cosine = math.sin(theta), math.cos(theta)
    even = dof % 2 == 0
    term, total = (1.0, 1.0) if even else (cosine, cosine if dof > 1 else 0.0)
    for j in range(1 if even else 2, dof - 1, 2):
        term *= cosine * cosine * j / (j + 1)
        total += term
    two_sided = sine * total if even else 2.0 / math.pi * (theta + sine * total)
    return 0.5 + 0.5 * two_sided


@lru_cache(maxsize=4096)
def student_quantile(p: float, dof: int) -> float:
    """Quantile of Student's t by bisection; normal above 400 degrees of freedom."""
    assert 0 < p < 1, p
    if dof > 400:
        return normal_quantile(p)
    if p < 0.5:
        return -student_quantile(1 - p, dof)
    low, high = 0.0, 1.0
    while student_cdf(high, dof) < p:
        high *= 2.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, dof) < p else (low, middle)
    return high


def quantile(values: Floats, q: float) -> float:
    """Quantile `q` by linear interpolation; NaN for an empty sample."""
    return float(np.quantile(values, q)) if values.size else math.nan


def binomial_cdf(n: int, p: float) -> Floats:
    """P(X <= k) for k = 0..n of a binomial, computed in logarithms."""
    if p in (0.0, 1.0):
        return np.asarray(np.arange(n + 1) >= (n if p == 1.0 else 0), np.float64)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    k = np.arange(n + 1)
    logs = log_factorial[n] - log_factorial - log_factorial[::-1]
    logs = logs + k * math.log(p) + (n - k) * math.log1p(-p)
    cdf: Floats = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return cdf


def quantile_interval(values: Floats, q: float, level: float = LEVEL) -> Interval:
    """Distribution-free interval of a quantile from order statistics of independent values. Its
    coverage is at least `level` for any distribution; an end is infinite while the sample is too
    small to have it."""
    n, estimate = values.size, quantile(values, q)
    if n == 0:
        return unknown(estimate, level)
    ordered = np.sort(values)
    cdf = binomial_cdf(n, q)
    tail = (1 - level) / 2
    below = int(np.searchsorted(cdf, tail, side="right"))
    above = int(np.searchsorted(cdf, 1 - tail, side="left")) + 1
    low = float(ordered[below - 1]) if below >= 1 else -math.inf
    high = float(ordered[above - 1]) if above <= n else math.inf
    return Interval(estimate, low, high, level)


def share_interval(successes: int, n: int) -> Interval:
    """Wilson's score interval (1927) of a share."""
    if n == 0:
        return unknown()
    z = normal_quantile(1 - (1 - LEVEL) / 2)
    p = successes / n
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    # At shares of 0 and 1 an end is the share itself, but for rounding.
    low, high = max(0.0, middle - half), min(1.0, middle + half)
    return Interval(p, min(p, low), max(p, high))
