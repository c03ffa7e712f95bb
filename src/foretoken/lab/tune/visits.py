"""What one start of a server tells: how long answers took at each load, by class and context.

Plain values; a visit knows nothing of what came before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, final

import numpy as np

from foretoken.lab.stats.intervals import Floats
from foretoken.lab.tune.settings import Setting

OUTLIER = 3.0
"""A request counts as at most so many times as slow, or as fast, as the usual one of its class:
one hiccup of a machine may not decide between settings."""
_FEWEST_ALIKE = 5
"""Requests of a class that tell what is usual there; fewer are held against all."""


class Answered(NamedTuple):
    """One answered request."""

    kind: str
    seconds: float
    tokens: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeen:
    """One load during a visit."""

    load: int
    pace_s: float
    """Seconds per token of an answer, first token and waiting included."""
    requests: int
    failed: int = 0
    seconds: float = 0.0
    kinds: dict[str, float] = field(default_factory=dict)
    """Seconds per token by class of request."""
    acceptance_length: float = math.nan


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One start of a server with one setting, and what it was asked."""

    setting: Setting
    turn: int
    """Visits of one turn were asked the same, one after the other."""
    loads: tuple[LoadSeen, ...] = ()
    start_s: float = 0.0
    seconds: float = 0.0
    check: bool = False
    """Whether it is part of the final A/B."""
    problem: str = ""
    most_tokens: int = 0
    """Answers were cut at so many tokens, for time; 0: they were as long as the workload has it."""

    def pace(self, load: int, kind: str = "") -> float:
        """Seconds per token at a load, of all requests or of one class; NaN where none was seen."""
        seen = next((seen for seen in self.loads if seen.load == load), None)
        if seen is None:
            return math.nan
        return seen.kinds.get(kind, math.nan) if kind else seen.pace_s


class ServerUnderTest(Protocol):
    """Something that can be started with a setting and asked at some loads."""

    def visit(self, setting: Setting, turn: int, sizes: Sequence[tuple[int, int]]) -> Visit:
        """Start it, ask `(load, requests)` each, and stop it.

        The same turn asks the same. A setting that it cannot run comes back with its `problem`.
        """


def summarize_load(
    load: int, answers: Sequence[Answered], *, failed: int = 0, seconds: float = 0.0
) -> LoadSeen:
    """Seconds per token over all answers and by class, outliers drawn in."""
    whole = [one for one in answers if one.tokens > 0]
    by_kind = {kind: [one for one in whole if one.kind == kind] for kind in {a.kind for a in whole}}
    drawn = {
        kind: _drawn_in(own, own if len(own) >= _FEWEST_ALIKE else whole)
        for kind, own in by_kind.items()
    }
    tokens = sum(float(tokens_N.sum()) for _, tokens_N in drawn.values())
    total = sum(float(seconds_N.sum()) for seconds_N, _ in drawn.values())
    return LoadSeen(
        load=load,
        pace_s=total / tokens if tokens else math.nan,
        requests=len(whole),
        failed=failed,
        seconds=seconds,
        kinds={
            kind: float(seconds_N.sum() / tokens_N.sum())
            for kind, (seconds_N, tokens_N) in sorted(drawn.items())
        },
    )


def _drawn_in(answers: Sequence[Answered], alike: Sequence[Answered]) -> tuple[Floats, Floats]:
    """Seconds and tokens of each answer of one class; `alike` tell what is usual."""
    tokens_N = np.array([one.tokens for one in answers], np.float64)
    paces_N = np.array([one.seconds for one in answers], np.float64) / tokens_N
    usual = float(np.median([one.seconds / one.tokens for one in alike]))
    return np.clip(paces_N, usual / OUTLIER, usual * OUTLIER) * tokens_N, tokens_N
