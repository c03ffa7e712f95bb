"""Plots about acceptance: by position, by temperature, per request, and what another k would give.

A histogram over verifications (entry j: steps that accepted j drafts) holds by position and every
smaller k exactly.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.lab.records.results import AcceptanceBucket
from foretoken.lab.report.canvas import BAD, CANDIDATE, FAINT, SERIES, WARN, new_figure
from foretoken.lab.report.judged import ReportRun


def _buckets(run: ReportRun, by: str) -> tuple[AcceptanceBucket, ...]:
    return run.summary.arm(run.summary.candidate).buckets(by)


def _histogram(run: ReportRun) -> tuple[int, ...]:
    found = _buckets(run, "all")
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


def by_temperature(run: ReportRun) -> Figure | None:
    """The histogram of accepted drafts for every temperature."""
    found = [b for b in _buckets(run, "temperature") if sum(b.histogram)]
    if not found:
        return None
    figure = new_figure(width=6.4, height=2.5)[0]
    figure.clear()
    grid = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, bucket in zip(grid, found, strict=True):
        shares = 100 * np.asarray(bucket.histogram) / sum(bucket.histogram)
        axes.bar(range(shares.size), shares, color=CANDIDATE, width=0.7)
        axes.set_title(f"T = {bucket.value}")
        axes.set_xticks(range(shares.size))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(f"accepted (rate {bucket.rate.estimate:.0%})")
    grid[0].set_ylabel("verifications, %")
    return figure


def rates(run: ReportRun) -> Figure | None:
    """Acceptance per class with P10 to P90 over requests, against the rate that breaks even."""
    found = [b for by in ("all", "temperature", "category", "output_tokens")
             for b in _buckets(run, by) if b.num_drafted]  # fmt: skip
    if not found:
        return None
    figure, axes = new_figure(height=0.9 + 0.34 * len(found))
    for row, bucket in enumerate(reversed(found)):
        _rate(axes, row, bucket)
    limit = run.decision.break_even_rate
    if limit is not None:
        axes.axvline(100 * limit, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate("breaks even", (100 * limit, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(0, 3), textcoords="offset points", color=BAD, fontsize=9,
                      ha="center", annotation_clip=False)  # fmt: skip
    axes.set_yticks(range(len(found)), [_name(b) for b in reversed(found)])
    axes.set_ylim(-0.6, len(found) - 0.3)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("acceptance rate, % (line: P10 to P90 of requests, noise taken out)")
    return figure


def _rate(axes: Axes, row: int, bucket: AcceptanceBucket) -> None:
    ends = [100 * bucket.p10.estimate, 100 * bucket.p90.estimate]
    if np.isfinite(ends).all():
        axes.plot(ends, [row, row], color=CANDIDATE, linewidth=5, alpha=0.25,
                  solid_capstyle="round")  # fmt: skip
    axes.plot(100 * bucket.rate.estimate, row, "o", color=CANDIDATE)
    if np.isfinite(bucket.raw_p10):
        axes.plot(100 * bucket.raw_p10, row, "|", color=FAINT, markersize=9)


def _name(bucket: AcceptanceBucket) -> str:
    if bucket.by == "all":
        return "all requests"
    if bucket.by == "temperature":
        return f"T {bucket.value}" if bucket.value[0] in "<>" else f"T = {bucket.value}"
    return bucket.value or bucket.by


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
