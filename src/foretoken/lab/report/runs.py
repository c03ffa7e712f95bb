"""Runs with their verdicts, as the page shows them, and their numbers as CSV."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.decision import Decision, decide
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary, AcceptanceBucket, ArmSummary, RequestRecord
from foretoken.lab.records.run_files import REQUESTS, ab_folders, read_ab, read_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    name: str
    summary: AbSummary
    decision: Decision

    @property
    def arms(self) -> tuple[ArmSummary, ArmSummary]:
        return self.summary.arm(self.summary.baseline), self.summary.arm(self.summary.candidate)

    @property
    def drafts(self) -> AcceptanceBucket | None:
        return self.arms[1].all_drafts

    @property
    def folder(self) -> Path:
        return Path(self.decision.run)

    def read_requests(self) -> list[RequestRecord]:
        """Its requests, those of a slow start marked as warm-up, as in the summary. Raises
        ConfigError: only that is there, or a line is broken."""
        return without_start(read_requests(self.folder)).records


def read_runs(
    folders: Sequence[Path], policy: ShipPolicy, reference: ArmSummary | None = None
) -> tuple[ReportRun, ...]:
    """Read the summary of every run, of a grid of every cell, and judge it; `reference` is for
    `decide`. Raises ConfigError: a folder holds no A/B."""
    folders = ab_folders(folders)
    names = names_of([f if f.is_dir() else f.parent for f in folders])
    found = []
    for folder, name in zip(folders, names, strict=True):
        summary = read_ab(folder)
        decision = decide(summary, policy, run=str(folder), reference=reference)
        found.append(ReportRun(name=name, summary=summary, decision=decision))
    return tuple(found)


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name per run, each different: as much of the end of its path as that takes."""
    parts = [folder.resolve().parts[1:] for folder in folders]
    for length in range(1, max([1, *map(len, parts)]) + 1):
        names = ["-".join(own[-length:]) for own in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{number}-{name}" for number, name in enumerate(names, start=1)]


def write_tables(folder: Path, runs: Sequence[ReportRun]) -> None:
    """gains.csv, rules.csv and requests.csv, which has none of a run that is but a summary. Raises
    ConfigError: `folder` cannot be written to, or a line of a run is broken."""
    gains = [
        (run.name, g.metric, g.ratio.estimate, g.ratio.low, g.ratio.high, g.num_blocks, g.enough)
        for run in runs
        for g in run.summary.gains
    ]
    rules = [
        (run.name, j.rule, j.weight, j.result.outcome, j.result.says)
        for run in runs
        for j in run.decision.rules
    ]
    requests = [
        (run.name, r.arm, r.block, r.index, r.warm_up, r.category, r.temperature, r.ttft_s,
         r.tpot_s, r.e2e_s, r.output_tokens, r.acceptance.rate if r.acceptance else "",
         r.error or "")
        for run in runs
        if (run.folder / REQUESTS).is_file()
        for r in run.read_requests()
    ]  # fmt: skip
    _csv(folder / "gains.csv", "run metric ratio low high blocks enough", gains)
    _csv(folder / "rules.csv", "run rule weight outcome says", rules)
    header = "run arm block index warm_up category temperature ttft_s tpot_s e2e_s output_tokens"
    _csv(folder / "requests.csv", f"{header} acceptance_rate error", requests)


def _csv(path: Path, header: str, rows: Iterable[Sequence[Any]]) -> None:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(header.split())
    writer.writerows(rows)
    write_text(path, lines.getvalue(), "--csv")


def write_text(path: Path, text: str, option: str) -> None:
    """Write a file and its folder; `option` names it in the ConfigError where that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(option, str(path), f"a place to write to ({error})") from error
