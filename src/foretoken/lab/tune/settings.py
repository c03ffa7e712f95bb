"""What is tuned: which drafter drafts, and how far at each load.

Knows no server and no command. A setting is what one start of a server runs with; a schedule is a
setting whose lengths differ by load.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from foretoken.lab.launch.drafting import MOST_RUNNING, Ranges
from foretoken.lab.launch.drafting import Schedule as Schedule


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """One drafter with its lengths, or nobody, or the server's own control."""

    drafter: str = ""
    lengths: tuple[int, ...] = ()
    """Drafts per step, at each load in turn, or one for all; empty: the server decides."""

    @property
    def is_off(self) -> bool:
        """Whether nobody ever drafts."""
        return not self.drafter

    @property
    def decides_itself(self) -> bool:
        """Whether the server chooses lengths by itself."""
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a search is about."""

    loads: tuple[int, ...]
    settings: tuple[Setting, ...]
    """To choose from, without `OFF`; each with one length for all loads, or none."""
    schedule: Schedule = "any"

    @property
    def drafters(self) -> tuple[str, ...]:
        """Their names, in order."""
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
    """(first, last, length), from 1 on; a range ends half way to the next load, in ratios.

    Ranges beside each other with the same length are one.
    """
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
