"""What one start of a server is asked, and what it tells: how long answers took at each load.

Plain values; a visit knows nothing of what came before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from foretoken.lab.stats.intervals import Floats
from foretoken.lab.tune.settings import Setting

OUTLIER = 3.0
"""A request counts as at most so many times as slow, or as fast, as the usual one of its class:
one hiccup of a machine may not decide between settings."""
_FEWEST_ALIKE = 5
"""Requests of a class that tell what is usual there; fewer are held against all."""


class NextVisit(NamedTuple):
    """What to start, and what to ask of it."""

    setting: Setting
    turn: int
    """Visits of one turn are asked the same, one after the other."""
    sizes: tuple[tuple[int, int], ...]
    """(load, requests) each."""
    check: bool = False
    """Whether it is part of the final A/B."""


class Answered(NamedTuple):
    """One answered request."""

    kind: str
    """Of requests that usually take as long for a token."""
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One start of a server with one setting, and what it told."""

    setting: Setting
    turn: int
    loads: tuple[LoadSeen, ...] = ()
    start_s: float = 0.0
    seconds: float = 0.0
    check: bool = False
    """Whether it is part of the final A/B."""
    problem: str = ""
    """Why the server cannot run with this setting."""
    most_tokens: int = 0
    """Answers were cut at so many tokens, for time; 0: they were as long as the workload has it."""

    def pace(self, load: int) -> float:
        """Seconds per token at a load; NaN where none was seen."""
        return next((seen.pace_s for seen in self.loads if seen.load == load), math.nan)


def summarize_load(
    load: int, answers: Sequence[Answered], *, failed: int = 0, seconds: float = 0.0
) -> LoadSeen:
    """Seconds per token over all answers, outliers of each class drawn in."""
    whole = [one for one in answers if one.tokens > 0]
    drawn_s = 0.0
    for kind in sorted({one.kind for one in whole}):
        own = [one for one in whole if one.kind == kind]
        alike = own if len(own) >= _FEWEST_ALIKE else whole
        usual = float(np.median([one.seconds / one.tokens for one in alike]))
        tokens_N: Floats = np.array([one.tokens for one in own], np.float64)
        paces_N = np.array([one.seconds for one in own], np.float64) / tokens_N
        drawn_s += float((np.clip(paces_N, usual / OUTLIER, usual * OUTLIER) * tokens_N).sum())
    tokens = sum(one.tokens for one in whole)
    return LoadSeen(
        load=load,
        pace_s=drawn_s / tokens if tokens else math.nan,
        requests=len(whole),
        failed=failed,
        seconds=seconds,
    )
