"""Intervals of quotients of estimates that share their blocks, such as where two lines cross.

The covariance of the estimates is that of the delete-one jackknife, blocks as the unit and runs as
strata. A quotient's interval is Fieller's (1954): all x for which top - x bottom is not told from
0, with Student's t. It has no upper end where the bottom itself is not told from 0.
"""

import math
from collections.abc import Sequence

import numpy as np

from foretoken.lab.stats.intervals import LEVEL, Floats, Interval, student_quantile
from foretoken.lab.stats.ratios import Ints


def jackknife_covariance(left_out_CP: Floats, strata_C: Ints) -> Floats:
    """Covariance of estimates, from those with one block left out each: (P, P)."""
    size = left_out_CP.shape[1]
    whole_PP = np.zeros((size, size))
    for stratum in np.unique(strata_C):
        own = left_out_CP[strata_C == stratum]
        apart = own - own.mean(axis=0)
        whole_PP += (len(own) - 1) / len(own) * apart.T @ apart
    return whole_PP


def quotient(
    estimates_P: Floats, forms: tuple[Sequence[float], Sequence[float]], covariance_PP: Floats,
    dof: int,
) -> Interval:  # fmt: skip
    """Interval of (top . estimates) / (bottom . estimates)."""
    top_P, bottom_P = (np.asarray(form, np.float64) for form in forms)
    top, bottom = float(top_P @ estimates_P), float(bottom_P @ estimates_P)
    t2 = student_quantile(1 - (1 - LEVEL) / 2, dof) ** 2
    # (top - x bottom)^2 <= t^2 var(top - x bottom), a parabola in x.
    square = bottom**2 - t2 * float(bottom_P @ covariance_PP @ bottom_P)
    linear = top * bottom - t2 * float(top_P @ covariance_PP @ bottom_P)
    constant = top**2 - t2 * float(top_P @ covariance_PP @ top_P)
    root = math.sqrt(max(0.0, linear**2 - square * constant))
    point = top / bottom if bottom else math.inf
    if square > 0:
        return Interval(point, (linear - root) / square, (linear + root) / square)
    # The set is everything but a stretch, or everything: its part that holds the estimate.
    ends = sorted(((linear - root) / square, (linear + root) / square)) if square and root else []
    low = max((end for end in ends if end <= point), default=-math.inf)
    return Interval(point, low, math.inf)
