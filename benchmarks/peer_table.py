"""The table of `peers.py`: what is compared, in which mode, what is wanted, and who came how far.

Every row is a ratio above which the wanted value lies: of speeds, ours over the fastest peer's, or
of the floor's time over ours, where nothing can be faster than memory. Knows
arithmetic only: nothing of engines, processes or clocks.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common import Goal, Ratio, at_least, ratio_of_medians
from peer_cases import OURS, OURS_8

FLOOR = "floor"
DECODE, FIRST = "decode", "first token"
WEIGHT_ONLY, EIGHT, SIXTEEN = "weight-only", "8-bit activations", "16 bit"


@dataclass(frozen=True, slots=True)
class Row:
    name: str
    part: str
    """What is run for it: a case of `peer_cases.py`."""
    mode: str
    wanted: float | None
    """The least ratio; None: told, not judged."""
    metric: str = DECODE
    over: str = "peers"
    """What ours is divided by: the fastest peer, or the floor."""

    @property
    def ours(self) -> str:
        """Our engine in the row's mode."""
        return OURS_8 if self.mode == EIGHT else OURS


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One engine at one row: seconds by turn of equal work, and the median of what is printed."""

    seconds: tuple[float, ...]
    shown: float
    unit: str
    read_gb_per_s: float
    note: str = ""
    """Its mode and setting, or what was wrong."""
    right: bool = True
    floor_s: tuple[float, ...] = ()
    """The shortest time for that work, by turn, where it can be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """A line with its figures."""

    name: str
    mode: str
    ours: Measured | None
    """None: it was not run; `note` says why."""
    peers: dict[str, Measured]
    best_peer: str | None
    over_peer: Ratio | None
    """Ours over the fastest peer."""
    over_floor: Ratio | None
    judged: Ratio | None
    """The one of them that the goal is about."""
    wanted: float | None
    met: bool | None
    short_by: float | None
    """Share of the wanted ratio that is missing; 0 if the goal is met."""
    note: str = ""


def fastest(peers: Mapping[str, Measured]) -> str | None:
    """The peer with the shortest median of seconds whose texts were right, if there is one."""
    able = {name: one for name, one in peers.items() if one.right and one.seconds}
    return min(able, key=lambda name: statistics.median(able[name].seconds), default=None)


def judge(row: Row, measured: Mapping[str, Measured], *, note: str = "") -> RowResult:
    """A line from what was measured, by engine."""
    ours = measured.get(row.ours)
    peers = {name: one for name, one in measured.items() if name not in (OURS, OURS_8)}
    best = fastest(peers)
    over_peer = over_floor = None
    if ours is not None and best is not None:
        over_peer = ratio_of_medians(peers[best].seconds, ours.seconds)
    if ours is not None and ours.floor_s:
        over_floor = ratio_of_medians(ours.floor_s, ours.seconds)
    judged = over_floor if row.over == FLOOR else over_peer
    if ours is not None and not ours.right:
        judged, note = None, note or "our text is wrong"
    met = missing = None
    if row.wanted is not None and judged is not None:
        met, missing = judged.value >= row.wanted, max(0.0, 1.0 - judged.value / row.wanted)
    return RowResult(
        name=row.name,
        mode=row.mode,
        ours=ours,
        peers=peers,
        best_peer=best,
        over_peer=over_peer,
        over_floor=over_floor,
        judged=judged,
        wanted=row.wanted,
        met=met,
        short_by=missing,
        note=note,
    )


def goals(results: Sequence[RowResult]) -> list[Goal]:
    """Of the rows that were judged."""
    return [
        at_least(f"{one.name} ({one.mode})", one.judged.value, one.wanted)
        for one in results
        if one.judged is not None and one.wanted is not None
    ]


def verdict(result: RowResult) -> str:
    """Met, missed by how much, or why neither."""
    if result.judged is None:
        return f"not judged: {result.note or 'nothing to compare with'}"
    if result.wanted is None:
        return f"{result.judged}, no goal in this mode"
    word = "met" if result.met else f"MISSED by {result.short_by:.1%}"
    return f"{result.judged}, wanted {result.wanted}: {word}"


def lines(result: RowResult) -> list[str]:
    """A row as it is printed: the verdict, then a line for each engine."""
    found = [f"{result.name} ({result.mode}): {verdict(result)}"]
    others = {"floor / ours": result.over_floor, f"ours / {result.best_peer}": result.over_peer}
    found += [
        f"    {name} {one}" for name, one in others.items() if one not in (None, result.judged)
    ]
    for name, one in {"ours": result.ours, **result.peers}.items():
        if one is not None:
            text = "" if one.right else "WRONG TEXT "
            read = f"{one.read_gb_per_s:.0f} GB/s" if one.read_gb_per_s else ""
            found.append(f"    {name:12} {one.shown:8.2f} {one.unit:9} {read:8} {text}{one.note}")
    return found + ([f"    {result.note}"] if result.note and result.judged is not None else [])


ROWS = (
    Row("plain, 16 bit", "16 bit", SIXTEEN, 0.97, over=FLOOR),
    Row("plain, int8", "int8", WEIGHT_ONLY, 0.95, over=FLOOR),
    Row("plain, int8", "int8", EIGHT, 0.95, over=FLOOR),
    Row("plain, int4", "int4", WEIGHT_ONLY, None),
    Row("plain, int4", "int4", EIGHT, 1.9),
    Row("draft right at 80 %, 16 bit", "16 bit, draft 80 %", SIXTEEN, 1.4),
    Row("draft right at 80 %, int8", "int8, draft 80 %", WEIGHT_ONLY, 1.5),
    Row("draft right at 80 %, int8", "int8, draft 80 %", EIGHT, 1.5),
    Row("draft right at 80 %, int4", "int4, draft 80 %", WEIGHT_ONLY, 2.0),
    Row("draft right at 80 %, int4", "int4, draft 80 %", EIGHT, 2.0),
    Row("prompt of 4,000, 16 bit", "16 bit, prompt 4000", SIXTEEN, 1.1, FIRST),
    Row("decoding at 4,000, 16 bit", "16 bit, prompt 4000", SIXTEEN, 1.2),
    Row("prompt of 4,000, int8", "int8, prompt 4000", WEIGHT_ONLY, 1.0, FIRST),
    Row("prompt of 4,000, int8", "int8, prompt 4000", EIGHT, 1.3, FIRST),
    Row("decoding at 4,000, int8", "int8, prompt 4000", WEIGHT_ONLY, 1.4),
    Row("decoding at 4,000, int8", "int8, prompt 4000", EIGHT, 1.4),
    Row("eight at once, 16 bit", "batch 8", SIXTEEN, 1.0),
)
