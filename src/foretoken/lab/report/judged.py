"""What a report is made from: runs with their verdicts. Knows no plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.decide.policy import ShipPolicy
from foretoken.lab.decide.verdict import Decision, decide
from foretoken.lab.records.files import REQUESTS, read_ab, read_requests, read_scrapes
from foretoken.lab.records.results import AbSummary, RequestRecord, Scrape


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportRun:
    """One A/B."""

    name: str
    summary: AbSummary
    decision: Decision
    requests: tuple[RequestRecord, ...]
    """Empty if only the summary is there."""
    scrapes: tuple[Scrape, ...]

    @property
    def load(self) -> float:
        """Requests per second that the baseline took."""
        return self.summary.arm(self.summary.baseline).requests_per_s

    def of_arm(self, arm: str) -> list[RequestRecord]:
        """Whole answers of one arm, warm-up left out."""
        return [r for r in self.requests if r.arm == arm and r.ok and not r.warm_up]


def read_runs(folders: Sequence[Path], policy: ShipPolicy) -> tuple[ReportRun, ...]:
    """Read and judge every run.

    Raises:
        ConfigError: a folder holds no A/B.
    """
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
        requests=tuple(read_requests(folder)) if has_requests else (),
        scrapes=tuple(read_scrapes(folder)) if folder.is_dir() else (),
    )
