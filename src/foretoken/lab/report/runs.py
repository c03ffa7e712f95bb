"""Runs with their verdicts, as `decide` and the page show them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.analysis.summary import counted
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.decision import Decision, decide
from foretoken.lab.decide.ship_policy import ShipPolicy
from foretoken.lab.records.results import AbSummary, AcceptanceBucket, ArmSummary, RequestRecord
from foretoken.lab.records.run_files import ab_folders, read_ab, read_requests


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

    @property
    def answers(self) -> tuple[list[RequestRecord], list[RequestRecord]]:
        """Whole answers of the baseline and of the candidate. Raises ConfigError, as above."""
        requests = self.read_requests()
        base, other = (counted(requests, arm.arm) for arm in self.arms)
        return base, other


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
