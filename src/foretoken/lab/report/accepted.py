"""Plots about acceptance: by position, and what another k would give.

A histogram over verifications (entry j: steps that accepted j drafts) holds by position and every
smaller k exactly.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.lab.report.by_class import buckets_of
from foretoken.lab.report.canvas import CANDIDATE, FAINT, SERIES, WARN, new_figure
from foretoken.lab.report.judged import ReportRun


def _histogram(run: ReportRun) -> tuple[int, ...]:
    found = buckets_of(run, "all")
    return found[0].histogram if found else ()


def by_position(run: ReportRun) -> Figure | None:
    """Share of verifications that accepted position i, and the same given all before it were."""
    steps_j = np.asarray(_histogram(run), dtype=float)
    if steps_j.size < 2 or not steps_j.sum():
        return None
    reached = steps_j[::-1].cumsum()[::-1] / steps_j.sum()
    figure, axes = new_figure(height=3.0)
    positions = np.arange(1, steps_j.size)
    axes.bar(positions, 100 * reached[1:], color=CANDIDATE, width=0.62, label="accepted")
    given = np.divide(reached[1:], reached[:-1], out=np.zeros_like(reached[1:]),
                      where=reached[:-1] > 0)  # fmt: skip
    axes.plot(positions, 100 * given, "o-", color=WARN, markersize=5,
              label="accepted, given all before were")  # fmt: skip
    axes.set_xticks(positions)
    axes.set_ylim(0, 105)
    axes.set_xlabel("draft position")
    axes.set_ylabel("verifications, %")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right")
    return figure


def other_k(run: ReportRun) -> Figure | None:
    """Tokens per verification at every k: exact up to the measured one, an estimate beyond."""
    steps_j = np.asarray(_histogram(run), dtype=float)
    if steps_j.size < 2 or not steps_j.sum():
        return None
    exact = lengths_by_k(steps_j)
    measured = steps_j.size - 1
    acceptance = ConstantAcceptance.of_length(exact[-1], measured)
    beyond = [acceptance.length(k) for k in range(measured, 2 * measured + 1)]
    figure, axes = new_figure(height=3.0)
    axes.plot(range(measured + 1), [1.0, *exact], "o-", color=CANDIDATE, label="replayed, exact")
    axes.plot(range(measured, 2 * measured + 1), beyond, "o--", color=SERIES[1], markersize=4,
              label="estimate: drafts independent")  # fmt: skip
    axes.axvline(measured, color=FAINT, linewidth=1.0, linestyle=":")
    axes.set_xlabel("k (dotted: as measured)")
    axes.set_ylabel("tokens per verification")
    axes.set_ylim(bottom=0.9)
    axes.legend(loc="lower right")
    return figure


def lengths_by_k(steps_j: Sequence[float] | np.ndarray) -> list[float]:
    """Tokens per verification for k = 1 up to the measured one, from a histogram."""
    counts = np.asarray(steps_j, dtype=float)
    accepted = np.arange(counts.size)
    return [
        float(1.0 + (np.minimum(accepted, k) * counts).sum() / counts.sum())
        for k in range(1, counts.size)
    ]
