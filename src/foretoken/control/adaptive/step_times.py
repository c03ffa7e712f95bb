"""Times of the last few steps, gathered so that learning from them costs little.

Steps of one shape are learnt together by a mean that no single slow step moves.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple, final

from foretoken.control.cost import StepShape
from foretoken.control.learned.drafter_cost import DraftShape
from foretoken.control.plan import StepLoad
from foretoken.types import StepStats

_FAR = 1.35
"""Times the median beyond which a step is an outlier, as for the regression that learns from it."""
_CHANGED = 2.0
"""Times as long from which on it is the machine that changed."""


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
    """Seconds of steps by their shape."""

    __slots__ = ("_drafters", "_target", "count")

    def __init__(self) -> None:
        """No step yet."""
        self.count = 0
        self._target: dict[tuple[int, int, int, int], list[float]] = {}
        self._drafters: dict[DraftingKind, list[float]] = {}

    def add(
        self, load: StepLoad, stats: StepStats, missing: Mapping[str, int], deciding_s: float
    ) -> None:
        """A step of this load took so long, `deciding_s` of it for its plan; drafters read what was
        `missing` in it."""
        self.count += 1
        drafted, decoding = stats.num_draft_tokens, load.num_decoding
        # What was really computed of prompts may differ from what was foreseen.
        key = decoding, load.num_prefilling, stats.num_tokens - drafted - decoding, drafted
        seconds = stats.busy_s - stats.drafting_s - deciding_s
        if key in self._target:
            self._target[key].append(seconds)
        else:
            self._target[key] = [seconds]
        for name, sequences, depth, num_drafts, took in stats.drafters:
            drafting = DraftingKind(name, sequences, depth, num_drafts, missing.get(name, 0))
            self._drafters.setdefault(drafting, []).append(took)

    def target(self, context: float, *, apart: bool) -> Iterator[tuple[StepShape, float, int]]:
        """Steps of sequences of so many tokens, their seconds without drafting, and how many they
        were: each one `apart`, or the middle of all."""
        for (decoding, prefilling, prompt, drafted), seconds in self._target.items():
            shape = StepShape(
                rows=decoding + prompt + drafted,
                sequences=decoding + prefilling,
                context=context,
                prompt_rows=prompt,
            )
            yield from ((shape, *counted) for counted in _counted(seconds, apart=apart))

    def drafters(self, *, apart: bool) -> Iterator[tuple[DraftingKind, float, int]]:
        """What each drafter did, with its seconds, and how often: each time `apart`, or the middle
        of all."""
        for drafting, seconds in self._drafters.items():
            yield from ((drafting, *counted) for counted in _counted(seconds, apart=apart))

    def clear(self) -> None:
        """Begin anew."""
        self.count = 0
        self._target.clear()
        self._drafters.clear()


def _counted(seconds: list[float], *, apart: bool) -> list[tuple[float, int]]:
    """Times of one kind, and for how many each stands: every one `apart`, or one for all of them.

    The one is their mean, those far from their median counted as less far: a median alone would be
    below what steps take, since most of their noise makes them longer, and shapes that are seldom
    seen, whose times come one by one, would seem dearer than the usual ones. Where the machine
    changed its speed meanwhile, no number stands for all.
    """
    count = len(seconds)
    if apart or count == 1:
        return [(one, 1) for one in seconds]
    ordered, quarter = sorted(seconds), count // 4
    if ordered[-1 - quarter] > _CHANGED * ordered[quarter]:
        return [(one, 1) for one in seconds]
    median = ordered[count // 2]
    low, high = median / _FAR, median * _FAR
    return [(sum(min(max(one, low), high) for one in seconds) / count, count)]
