"""What a report is made from: runs with their verdicts. Knows no plot."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from foretoken.lab.deciding.policy import ShipPolicy
from foretoken.lab.deciding.verdict import Decision, decide
from foretoken.lab.results import AbSummary, RequestRecord, Scrape
from foretoken.lab.results_io import REQUESTS, read_ab, read_requests, read_scrapes


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
    return tuple(_read(folder, policy) for folder in folders)


def _read(folder: Path, policy: ShipPolicy) -> ReportRun:
    summary = read_ab(folder)
    has_requests = folder.is_dir() and (folder / REQUESTS).is_file()
    return ReportRun(
        name=folder.name if folder.is_dir() else folder.parent.name,
        summary=summary,
        decision=decide(summary, policy, run=folder.name),
        requests=tuple(read_requests(folder)) if has_requests else (),
        scrapes=tuple(read_scrapes(folder)) if folder.is_dir() else (),
    )
