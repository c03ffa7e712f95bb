"""The report's numbers as CSV and JSON lines."""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from typing import Any

from foretoken.lab.plain import to_plain
from foretoken.lab.report.judged import ReportRun


def gains_csv(runs: Sequence[ReportRun]) -> str:
    """One line per run and gain."""
    rows = [
        (run.name, g.metric, g.ratio.estimate, g.ratio.low, g.ratio.high, g.num_blocks, g.enough)
        for run in runs
        for g in run.summary.gains
    ]
    return _csv(("run", "metric", "ratio", "low", "high", "blocks", "enough"), rows)


def rules_csv(runs: Sequence[ReportRun]) -> str:
    """One line per run and rule."""
    rows = [
        (run.name, j.rule, j.weight, j.result.outcome, j.result.says)
        for run in runs
        for j in run.decision.rules
    ]
    return _csv(("run", "rule", "weight", "outcome", "says"), rows)


def requests_csv(runs: Sequence[ReportRun]) -> str:
    """One line per request."""
    rows = [
        (run.name, r.arm, r.block, r.index, r.category, r.temperature, r.ttft_s, r.tpot_s, r.e2e_s,
         r.output_tokens, r.acceptance.rate if r.acceptance else "", r.error or "")
        for run in runs
        for r in run.requests
    ]  # fmt: skip
    header = ("run", "arm", "block", "index", "category", "temperature", "ttft_s", "tpot_s",
              "e2e_s", "output_tokens", "acceptance_rate", "error")  # fmt: skip
    return _csv(header, rows)


def report_lines(runs: Sequence[ReportRun]) -> str:
    """One JSON line per run: its decision and its summary."""
    lines = [
        {"run": run.name, "decision": to_plain(run.decision), "summary": to_plain(run.summary)}
        for run in runs
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def _csv(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return buffer.getvalue()
