"""What is tuned (who drafts, and how far at each load), and what one start of a server tells.

Plain values; knows no server and no command. A setting is what one start runs with; a schedule is a
setting whose lengths differ by load. A visit is one start, and knows nothing of those before it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from foretoken.lab.launch.engines import MOST_RUNNING, Ranges, Schedule
from foretoken.lab.stats.intervals import Floats

OUTLIER = 3.0
"""A request counts as at most so many times as slow, or as fast, as the usual one of its class:
one hiccup of a machine may not decide between settings."""
_FEWEST_ALIKE = 5
"""Requests of a class that tell what is usual there; fewer are held against all."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One drafter with its lengths, or nobody, or the server's own control."""

    drafter: str = ""
    lengths: tuple[int, ...] = ()
    """Drafts per step, at each load in turn, or one for all; empty: the server decides."""

    @property
    def is_off(self) -> bool:
        return not self.drafter

    @property
    def decides_itself(self) -> bool:
        return bool(self.drafter) and not self.lengths

    def length(self, place: int) -> int:
        """Drafts per step at the load of this place."""
        return self.lengths[place if len(self.lengths) > 1 else 0] if self.lengths else 0

    def shortest(self) -> "Setting":
        """The shortest way to say it: one length where all are equal."""
        if len(set(self.lengths)) != 1:
            return self
        return Setting(self.drafter, self.lengths[:1]) if self.lengths[0] else OFF

    @property
    def name(self) -> str:
        """In a few characters: `off`, `ngram k=3`, `ngram k=5/3/0`, `auto`."""
        if self.is_off:
            return "off"
        if self.decides_itself:
            return self.drafter
        return f"{self.drafter} k={'/'.join(map(str, self.lengths))}"


OFF = Setting()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    loads: tuple[int, ...]
    settings: tuple[Setting, ...]
    """To choose from, without `OFF`; each with one length for all loads, or none."""
    schedule: Schedule = "any"

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(setting.drafter for setting in self.settings))

    def index_at(self, setting: Setting, place: int) -> int | None:
        """Which of the settings it is at the load of this place; None: it drafts nothing there, or
        is none of them."""
        length = setting.length(place)
        if setting.is_off or (setting.lengths and not length):
            return None
        wanted = Setting(setting.drafter, (length,) if setting.lengths else ())
        return self.settings.index(wanted) if wanted in self.settings else None


def ranges_of(lengths: Sequence[int], loads: Sequence[int]) -> Ranges:
    """(first, last, length), from 1 on; a range ends half way to the next load, in ratios. Ranges
    beside each other with the same length are one."""
    assert len(lengths) == len(loads), (lengths, loads)
    found: list[tuple[int, int, int]] = []
    first = 1
    for place, length in enumerate(lengths):
        last = MOST_RUNNING
        if place + 1 < len(loads):
            last = max(int((loads[place] * loads[place + 1]) ** 0.5), loads[place])
        if found and found[-1][2] == length:
            found[-1] = (found[-1][0], last, length)
        else:
            found.append((first, last, length))
        first = last + 1
    return tuple(found)


class NextVisit(NamedTuple):
    setting: Setting
    turn: int
    """Visits of one turn are asked the same, one after the other."""
    sizes: tuple[tuple[int, int], ...]
    """(load, requests) each."""
    check: bool = False
    """Whether it is part of the final A/B."""


class Answered(NamedTuple):
    kind: str
    """Of requests that usually take as long for a token."""
    seconds: float
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSeen:
    load: int
    pace_s: float
    """Seconds per token of an answer, first token and waiting included."""
    requests: int
    failed: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One start of a server with one setting, and what it told."""

    setting: Setting
    turn: int
    loads: tuple[LoadSeen, ...] = ()
    start_s: float = 0.0
    seconds: float = 0.0
    check: bool = False
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
