"""What a report is made from: runs with their verdicts; and their numbers as CSV and JSON lines.

Knows no plot.
"""

import csv
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.decide.verdict import Decision, decide
from foretoken.lab.plain import to_plain
from foretoken.lab.records.results import AbSummary, RequestRecord, Scrape
from foretoken.lab.records.run_files import (
    REQUESTS,
    ab_folders,
    read_ab,
    read_requests,
    read_scrapes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One A/B."""

    name: str
    summary: AbSummary
    decision: Decision
    requests: tuple[RequestRecord, ...]
    """Those of a slow start are marked as warm-up, as in the summary; empty if only that is there.
    """
    scrapes: tuple[Scrape, ...]

    def of_arm(self, arm: str) -> list[RequestRecord]:
        """Whole answers of one arm, warm-up left out."""
        return [r for r in self.requests if r.arm == arm and r.ok and not r.warm_up]


def read_runs(folders: Sequence[Path], policy: ShipPolicy) -> tuple[ReportRun, ...]:
    """Read and judge every run; of a sweep, every cell.

    Raises:
        ConfigError: a folder holds no A/B.
    """
    folders = ab_folders(folders)
    names = names_of([f if f.is_dir() else f.parent for f in folders])
    return tuple(_read(f, policy, name) for f, name in zip(folders, names, strict=True))


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name per run, each different: as much of the end of its path as that takes."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["-".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, start=1)]


def _read(folder: Path, policy: ShipPolicy, name: str) -> ReportRun:
    summary = read_ab(folder)
    has_requests = folder.is_dir() and (folder / REQUESTS).is_file()
    return ReportRun(
        name=name,
        summary=summary,
        decision=decide(summary, policy, run=name),
        requests=tuple(without_start(read_requests(folder)).records) if has_requests else (),
        scrapes=tuple(read_scrapes(folder)) if folder.is_dir() else (),
    )


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
        (run.name, r.arm, r.block, r.index, r.warm_up, r.category, r.temperature, r.ttft_s,
         r.tpot_s, r.e2e_s, r.output_tokens, r.acceptance.rate if r.acceptance else "",
         r.error or "")
        for run in runs
        for r in run.requests
    ]  # fmt: skip
    header = ("run", "arm", "block", "index", "warm_up", "category", "temperature", "ttft_s",
              "tpot_s", "e2e_s", "output_tokens", "acceptance_rate", "error")  # fmt: skip
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
