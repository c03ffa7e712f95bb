"""The slow start of every block, found in the measured requests and left out of everything. Pure.

The same requests are left out of both arms, so that what is left is still paired. They stay in the
file and are marked as warm-up, and the seconds in which they ran do not count for rates.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from foretoken.lab.analysis.summary import ArmData
from foretoken.lab.records.results import RequestRecord
from foretoken.lab.stats.intervals import Floats
from foretoken.lab.stats.steady import start_length

Place = tuple[int, int]
"""Block and index of a request, the same in both arms."""


@dataclass(frozen=True, slots=True)
class WithoutStart:
    """Records with the slow start marked as warm-up."""

    records: list[RequestRecord]
    cut: int
    """Requests left out of each block."""
    lost_s: Mapping[tuple[str, int], float]
    """Seconds of each arm and block before its first request that counts."""

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.cut:
            return ()
        return (f"the first {self.cut} requests of every block ran differently from the rest and "
                "are left out",)  # fmt: skip

    def shorten(self, data: ArmData) -> ArmData:
        """The arm's blocks without the seconds of what was left out."""
        seconds = {
            block: own - self.lost_s.get((data.arm, block), 0.0)
            for block, own in data.seconds_of_block.items()
        }
        return replace(data, seconds_of_block=seconds)


def without_start(records: Sequence[RequestRecord]) -> WithoutStart:
    """Find the slow start over all blocks of all arms, and mark it as warm-up."""
    places = _places(records)
    courses = {
        (arm, name): _course(records, places, arm, name)
        for arm in {r.arm for r in records}
        for name in ("tpot_s", "ttft_s")
    }
    cuts = [start_length(course_CN) for course_CN in courses.values()]
    arms = sorted({arm for arm, _ in courses})
    if len(arms) == 2:
        ratios = (courses[arms[0], name] - courses[arms[1], name] for name in ("tpot_s", "ttft_s"))
        cuts += [start_length(ratio_CN, either_way=True) for ratio_CN in ratios]
    cut = max(cuts, default=0)
    if not cut:
        return WithoutStart(list(records), 0, {})
    marked = [
        replace(r, warm_up=True) if places.get((r.block, r.index), cut) < cut else r
        for r in records
    ]
    before, after = _first_due(records), _first_due(marked)
    return WithoutStart(marked, cut, {key: after[key] - before[key] for key in after})


def _first_due(records: Sequence[RequestRecord]) -> dict[tuple[str, int], float]:
    """When the first request that counts was due, by arm and block."""
    found: dict[tuple[str, int], float] = {}
    for record in records:
        if not record.warm_up:
            key = (record.arm, record.block)
            found[key] = min(record.scheduled_s, found.get(key, math.inf))
    return found


def _places(records: Sequence[RequestRecord]) -> dict[Place, int]:
    """Each request's place in its block, in the order of arrival."""
    due: dict[int, dict[int, float]] = defaultdict(dict)
    for record in records:
        if not record.warm_up:
            own = due[record.block]
            own[record.index] = min(record.scheduled_s, own.get(record.index, math.inf))
    return {
        (block, index): place
        for block, own in due.items()
        for place, index in enumerate(sorted(own, key=lambda i: (own[i], i)))
    }


def _course(
    records: Sequence[RequestRecord], places: Mapping[Place, int], arm: str, name: str
) -> Floats:
    """Logarithms of a time by block and place; NaN where there was no whole answer."""
    blocks = {block: row for row, block in enumerate(sorted({block for block, _ in places}))}
    course_CN = np.full((len(blocks), max(places.values(), default=-1) + 1), np.nan)
    for record in records:
        value = getattr(record, name)
        if record.arm == arm and record.ok and not record.warm_up and value > 0:
            course_CN[blocks[record.block], places[record.block, record.index]] = math.log(value)
    return course_CN
