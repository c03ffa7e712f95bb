"""Times of the last few steps, gathered so that learning from them costs little.

Steps of one shape are learnt together by their median, which no single slow step moves.
"""

from collections.abc import Iterator
from typing import NamedTuple, final

from foretoken.control.adaptive.planner import MadePlan
from foretoken.control.learned.cost import DraftShape
from foretoken.types import StepStats


class DraftingKind(NamedTuple):
    """What a drafter did in a step, its context aside."""

    name: str
    sequences: int
    depth: int
    num_drafts: int
    fed_rows: int

    def shape(self, context: float) -> DraftShape:
        """The same for the model of time."""
        return DraftShape(
            sequences=self.sequences,
            passes=self.depth,
            rows=self.num_drafts,
            context=context,
            fed_rows=self.fed_rows,
        )


@final
class RecentTimes:
    """Seconds by shape, of steps that one plan was made for."""

    __slots__ = ("_drafters", "_target", "count")

    def __init__(self) -> None:
        """No step yet."""
        self.count = 0
        self._target: dict[tuple[int, int], list[float]] = {}
        self._drafters: dict[DraftingKind, list[float]] = {}

    def add(self, made: MadePlan, stats: StepStats, *, first: bool) -> None:
        """A step of this plan; drafters read what they missed in its `first`."""
        self.count += 1
        drafted = stats.num_draft_tokens
        key = stats.num_tokens - drafted - stats.num_sampled, drafted
        seconds = stats.total_s - stats.drafting_s
        if key in self._target:
            self._target[key].append(seconds)
        else:
            self._target[key] = [seconds]
        for name, sequences, depth, num_drafts, took in stats.drafters:
            fed_rows = made.missing.get(name, 0) if first else 0
            drafting = DraftingKind(name, sequences, depth, num_drafts, fed_rows)
            self._drafters.setdefault(drafting, []).append(took)

    def target(self, *, apart: bool) -> Iterator[tuple[tuple[int, int], float, int]]:
        """Prompt rows and draft rows, the seconds of such a step without drafting, and of how many
        steps: each one `apart`, or the median of all."""
        for key, seconds in self._target.items():
            if apart:
                yield from ((key, each, 1) for each in seconds)
            else:
                yield key, _median(seconds), len(seconds)

    def drafters(self, *, apart: bool) -> Iterator[tuple[DraftingKind, float]]:
        """What each drafter did, with its seconds: each time `apart`, or the median of all."""
        for drafting, seconds in self._drafters.items():
            if apart:
                yield from ((drafting, each) for each in seconds)
            else:
                yield drafting, _median(seconds)

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._target.clear()
        self._drafters.clear()


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]
