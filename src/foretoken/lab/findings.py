"""What a check of the lab answers: a level, a sentence, and what to do.

Shared by `plan` and `lint`. Policies have their own results, which carry intervals.
"""

from collections.abc import Iterable
from dataclasses import dataclass

LEVELS = ("error", "warning", "note", "ok")


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    """Name of the check, as `docs/deciding.md` lists it."""
    level: str
    """`error`: it will not work. `warning`: it may not pay. `note`: worth knowing. `ok`."""
    where: str
    """The flag, key or metric that it is about; empty where it is about the whole."""
    message: str
    remedy: str = ""
    """What to do instead; empty where there is nothing to do."""

    def __post_init__(self) -> None:
        assert self.level in LEVELS, (self.level, LEVELS)


def worst_level(findings: Iterable[Finding]) -> str:
    return min((f.level for f in findings), key=LEVELS.index, default="ok")
