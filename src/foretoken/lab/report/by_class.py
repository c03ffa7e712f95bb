"""Plots about classes of requests: what each gains, in the mix and alone, and how it accepts."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.decide.evidence import requests_to_support
from foretoken.lab.records.results import AcceptanceBucket, ArmGain, ClassGains
from foretoken.lab.report.canvas import (
    BAD,
    CANDIDATE,
    FAINT,
    gain_rows,
    new_figure,
)
from foretoken.lab.report.judged import ReportRun


def class_gains(run: ReportRun) -> Figure | None:
    """Gain of TPOT P50 and P99 per class; hollow where a P99 has too few requests."""
    rows = [
        (f"{class_label(own)}{where} {metric[-3:].upper()}, n={_counted(gain)}", gain)
        for own, where in _classes(run)
        for metric in ("tpot_p50", "tpot_p99")
        if (gain := own.gain(metric)) is not None and np.isfinite(gain.ratio.estimate)
    ]
    if not rows:
        return None
    label = "gain of TPOT, 95 % interval (hollow: too few)"
    return gain_rows(rows, 0.9 + 0.3 * len(rows), label)


def _counted(gain: ArmGain) -> str:
    if gain.enough:
        return f"{gain.num_pairs:,}"
    return f"{gain.num_pairs:,} of {requests_to_support(gain):,}"


def _classes(run: ReportRun) -> list[tuple[ClassGains, str]]:
    found = [(own, "") for own in run.summary.classes]
    return found + [(own, " alone") for own in run.summary.diagnosis]


def class_label(own: ClassGains) -> str:
    """The class as a label."""
    short = {"temperature": "T = ", "category": "", "context": "prompt "}
    return f"{short.get(own.by, '')}{own.value}"


def buckets_of(run: ReportRun, by: str) -> tuple[AcceptanceBucket, ...]:
    """The candidate's acceptance by temperature, category or output_tokens."""
    return run.summary.arm(run.summary.candidate).buckets(by)


def rates(run: ReportRun) -> Figure | None:
    """Acceptance per class with P10 to P90 over requests, against the rate that breaks even."""
    found = [b for by in ("all", "temperature", "category", "output_tokens")
             for b in buckets_of(run, by) if b.num_drafted]  # fmt: skip
    if not found:
        return None
    figure, axes = new_figure(height=0.9 + 0.34 * len(found))
    for row, bucket in enumerate(reversed(found)):
        _rate(axes, row, bucket)
    limit = run.decision.break_even_rate
    if limit is not None and 0 <= limit <= 1:
        axes.axvline(100 * limit, color=BAD, linewidth=1.2, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate("breaks even", (100 * limit, 1.0), xycoords=("data", "axes fraction"),
                      xytext=(0, 3), textcoords="offset points", color=BAD, fontsize=9,
                      ha="center", annotation_clip=False)  # fmt: skip
    names = [f"{_label(b)}, n={b.num_requests}" for b in reversed(found)]
    axes.set_yticks(range(len(found)), names)
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


def _label(bucket: AcceptanceBucket) -> str:
    if bucket.by == "all":
        return "all requests"
    if bucket.by == "temperature":
        return f"T {bucket.value}" if bucket.value[0] in "<>" else f"T = {bucket.value}"
    if bucket.by == "output_tokens":
        return f"{bucket.value} tokens out"
    return bucket.value or bucket.by


def histograms(run: ReportRun, by: str = "temperature") -> Figure | None:
    """The histogram of accepted drafts for every temperature."""
    found: Sequence[AcceptanceBucket] = [b for b in buckets_of(run, by) if sum(b.histogram)]
    if len(found) < 2:
        return None
    figure = new_figure(width=6.4, height=2.6)[0]
    figure.clear()
    grid = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, bucket in zip(grid, found, strict=True):
        shares = 100 * np.asarray(bucket.histogram) / sum(bucket.histogram)
        axes.bar(range(shares.size), shares, color=CANDIDATE, width=0.7)
        axes.set_title(_label(bucket))
        axes.set_xticks(range(shares.size))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel(f"rate {bucket.rate.estimate:.0%}\nn={sum(bucket.histogram):,}")
    grid[0].set_ylabel("verifications, %")
    return figure
