"""Ratios of speeds with their intervals, the bars that they are held against, and the table.

Every ratio is above 1 where the first arm is faster. A bar counts as missed only if it still is
after what an off server gained or lost against another off server in the same run. Knows no server.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from common import Goal, Ratio, ratio_of
from never_slower_load import Round

RESAMPLES = 1000
"""Fewer than usual: each draws percentiles of all requests."""
Sample = Sequence[Round]


def _pooled(values: Callable[[Round], list[float]], percent: float) -> Callable[[Sample], float]:
    """Speed by a percentile of all requests of some rounds."""

    def speed(rounds: Sample) -> float:
        return 1.0 / float(np.percentile([v for one in rounds for v in values(one)], percent))

    return speed


def _ttft(one: Round) -> list[float]:
    return [reply.ttft_s for reply in one.replies]


def _tpot(one: Round) -> list[float]:
    return [tpot for reply in one.replies if (tpot := reply.tpot_s) is not None]


def _whole(one: Round) -> list[float]:
    return [reply.whole_s for reply in one.replies]


SPEEDS: dict[str, Callable[[Sample], float]] = {
    "throughput": lambda rounds: float(np.median([one.tokens_per_s for one in rounds])),
    "decoding": lambda rounds: float(np.median([one.together_per_s for one in rounds])),
    "TPOT P50": _pooled(_tpot, 50),
    "TPOT P99": _pooled(_tpot, 99),
    "TTFT P50": _pooled(_ttft, 50),
    "TTFT P99": _pooled(_ttft, 99),
    "end to end": _pooled(_whole, 50),
}
"""Of some rounds of an arm: tokens per second, or one over a time."""


def compare(name: str, above: Sample, below: Sample) -> Ratio:
    """How much faster `above` is; both hold one round per turn, in the same order."""
    speed = SPEEDS[name]
    return ratio_of(list(zip(above, below, strict=True)), speed, RESAMPLES)


def resolution(off: Ratio | None) -> float:
    """What two equal servers differed by, at the far end of the interval."""
    return 0.0 if off is None else max(off.high, 1.0 / off.low) - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar and what was measured."""

    case: str
    what: str
    wanted: float
    wanted_low: float | None = None
    """What the lower end of the interval has to reach."""
    measured: Ratio
    resolution: float

    @property
    def verdict(self) -> str:
        """`met`, `noise` (below it by less than two equal servers differ), or `MISSED`."""

        def met(slack: float) -> bool:
            value, low = self.measured.value * slack, self.measured.low * slack
            return value >= self.wanted and (self.wanted_low is None or low >= self.wanted_low)

        if met(1.0):
            return "met"
        return "noise" if met(1.0 + self.resolution) else "MISSED"

    def __str__(self) -> str:
        low = "" if self.wanted_low is None else f" ({self.wanted_low})"
        return (
            f"  {self.verdict:6}  {self.what:58} {self.measured!s:22} "
            f">= {self.wanted}{low:8} off/off +-{self.resolution:.3f}"
        )

    def goal(self) -> Goal:
        return Goal(
            name=f"{self.case}: {self.what} [{self.verdict}, off/off {self.resolution:.3f}]",
            wanted=f">= {self.wanted}" + (f" (low {self.wanted_low})" if self.wanted_low else ""),
            measured=self.measured.value,
            met=self.verdict != "MISSED",
        )


def scaled(ratio: Ratio, by: float) -> Ratio:
    """The ratio and its ends, times a number."""
    return replace(
        ratio,
        value=ratio.value * by,
        low=ratio.low * by,
        high=ratio.high * by,
        least=ratio.least * by,
        most=ratio.most * by,
    )


def single(value: float) -> Ratio:
    """A number that was measured once."""
    return Ratio(value=value, low=value, high=value, least=value, most=value, repeats=1)


def summary(rounds: Sample) -> dict[str, float]:
    """An arm's own numbers: tokens per second, milliseconds."""
    times = {
        f"{name}, ms": 1e3 / SPEEDS[name](rounds)
        for name in ("TPOT P50", "TPOT P99", "TTFT P50", "TTFT P99")
    }
    return {"tokens/s": SPEEDS["throughput"](rounds), **times}


def show_arms(title: str, arms: Mapping[str, Sample]) -> dict[str, dict[str, float]]:
    """Print a table of the arms' own numbers, and return them."""
    found = {name: summary(rounds) for name, rounds in arms.items()}
    print(f"\n{title}")
    print(f"  {'':12}{'tokens/s':>10}{'TPOT P50':>10}{'P99':>9}{'TTFT P50':>10}{'P99 ms':>9}")
    for name, one in found.items():
        numbers = list(one.values())
        print(
            f"  {name:12}{numbers[0]:10.1f}{numbers[1]:10.3f}{numbers[2]:9.3f}"
            f"{numbers[3]:10.2f}{numbers[4]:9.2f}",
            flush=True,
        )
    return found
