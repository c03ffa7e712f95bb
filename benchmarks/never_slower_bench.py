"""What the cases of `never_slower.py` share: arms, rounds in turns, ratios of speeds, and bars.

Every ratio is above 1 where the first arm is faster. A bar counts as missed only if it still is
after what an off server gained or lost against another off server in the same run.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import Goal, Ratio, ratio_of, ratio_of_medians
from never_slower_arms import Arm, Pair, Servers, plain_ask
from never_slower_drafter import Stream, write_streams
from never_slower_load import Ask, Crowd, Reply, Round

from foretoken.lab.stats.repeats import in_turn

CHOOSING, MEASURED, TAUGHT, LONG = (half * 1_000_000 for half in range(4))
"""First numbers of prompts: what a length is chosen on is not what is measured."""
CACHED, UNCACHED = "--enable-prefix-caching", "--no-enable-prefix-caching"
RESAMPLES = 1000
"""Fewer than usual: each draws percentiles of all requests."""
Asks = Callable[[int, int], list[Ask]]
"""Requests from a first number, and how many."""
Turns = Callable[[int], Sequence[Crowd]]
"""The requests of a turn."""
Sample = Sequence[Round]


def _pooled(values: Callable[[Reply], float | None], percent: float) -> Callable[[Sample], float]:
    """Speed by a percentile of all requests of some rounds."""

    def speed(rounds: Sample) -> float:
        found = [value for one in rounds for r in one.replies if (value := values(r)) is not None]
        return 1.0 / float(np.percentile(found, percent))

    return speed


SPEEDS: dict[str, Callable[[Sample], float]] = {
    "throughput": lambda rounds: float(np.median([one.tokens_per_s for one in rounds])),
    "TPOT P50": _pooled(lambda reply: reply.tpot_s, 50),
    "TPOT P99": _pooled(lambda reply: reply.tpot_s, 99),
    "TTFT P50": _pooled(lambda reply: reply.ttft_s, 50),
    "TTFT P99": _pooled(lambda reply: reply.ttft_s, 99),
    "end to end": _pooled(lambda reply: reply.whole_s, 50),
    "decoding": lambda rounds: float(np.median([one.together_per_s for one in rounds])),
}
"""Of some rounds of an arm: tokens per second, or one over a time."""


def compare(name: str, above: Sample, below: Sample) -> Ratio:
    """How much faster `above` is; both hold one round per turn, in the same order."""
    return ratio_of(list(zip(above, below, strict=True)), SPEEDS[name], RESAMPLES)


def single(value: float) -> Ratio:
    """A number that was measured once."""
    return ratio_of_medians([value], [1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar and what was measured."""

    case: str
    what: str
    wanted: float
    wanted_low: float
    """What the lower end of the interval has to reach; 0: nothing."""
    measured: Ratio
    resolution: float
    """What two equal servers differed by, at the far end of the interval."""

    @property
    def verdict(self) -> str:
        """`met`, `noise` (below it by less than two equal servers differ), or `MISSED`."""
        value, low = self.measured.value, self.measured.low
        for word, slack in (("met", 1.0), ("noise", 1.0 + self.resolution)):
            if value * slack >= self.wanted and low * slack >= self.wanted_low:
                return word
        return "MISSED"

    def __str__(self) -> str:
        low = f" ({self.wanted_low})" if self.wanted_low else ""
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


def show_arms(title: str, arms: Mapping[str, Sample]) -> dict[str, dict[str, float]]:
    """Print a table of the arms' own numbers, and return them."""
    found = {}
    print(f"\n{title}")
    print(f"  {'':12}{'tokens/s':>10}{'TPOT P50':>10}{'P99':>10}{'TTFT P50':>10}{'P99 ms':>10}")
    for name, rounds in arms.items():
        speeds = {key: speed(rounds) for key, speed in list(SPEEDS.items())[:5]}
        found[name] = {
            key: value if key == "throughput" else 1e3 / value for key, value in speeds.items()
        }
        print(f"  {name:12}" + "".join(f"{n:10.2f}" for n in found[name].values()), flush=True)
    return found


@dataclass(slots=True, kw_only=True)
class Bench:
    """One run: what was asked for, and what was found so far."""

    given: argparse.Namespace
    pair: Pair
    servers: Servers
    scratch: Path
    bars: list[Bar] = field(default_factory=list)
    num_answers: int = 0
    different: list[str] = field(default_factory=list)
    """Answers that were not the same tokens as another arm's."""
    client_shares: list[float] = field(default_factory=list)
    _tokens: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def max_drafts(self) -> int:
        """Most drafts of a step, in every arm that drafts."""
        return int(max(self.given.lengths))

    def off(self, cache: str = UNCACHED) -> list[Arm]:
        """The server without speculation, and another one."""
        spec = self.pair.off(cache)
        again = spec.again() if self.pair.second_off else spec
        return [Arm(name="off", spec=spec), Arm(name="off again", spec=again)]

    def control(self, cache: str = UNCACHED) -> Arm:
        """What `serve` does if nobody says how far to draft."""
        config = self.given.control_config or self._drafting()
        return Arm(name="control", spec=self.pair.drafted(config, cache))

    def fixed(self) -> Arm:
        """Drafts at any load, as far as its requests say."""
        spec = self.pair.drafted(self._drafting(), UNCACHED, "--no-adaptive-speculation")
        return Arm(name="fixed", spec=spec)

    def _drafting(self) -> dict[str, Any]:
        return {**self.pair.drafting, "num_speculative_tokens": self.max_drafts}

    def steered(self, name: str, streams: Sequence[Stream]) -> tuple[Arm, Arm]:
        """Two servers with a drafter that does as told: adaptive, and at fixed lengths."""
        path = self.scratch / f"{name}.json"
        write_streams(path, streams, self.given.pass_ms / 1e3)
        specs = [self.pair.steered(path, self.max_drafts, UNCACHED, *more)
                 for more in ((), ("--no-adaptive-speculation",))]  # fmt: skip
        return Arm(name="control", spec=specs[0]), Arm(name="fixed", spec=specs[1])

    def asks(self, first: int, count: int) -> list[Ask]:
        return [plain_ask(self.pair, first + i) for i in range(count)]

    def ask(self, arm: Arm, crowds: Sequence[Crowd]) -> Round:
        """One round, whose tokens must be those of every other arm."""
        found = self.servers.ask(arm, crowds)
        self.client_shares.append(found.client_share)
        for reply in found.replies:
            self.num_answers += 1
            if self._tokens.setdefault(reply.ask.key, reply.ids) != reply.ids:
                self.different.append(f"{arm.name}, {reply.ask.key}")
        return found

    def forget(self) -> None:
        """Drop the tokens of a case that is over."""
        self._tokens.clear()

    def size(self, arm: Arm, load: int, make: Asks) -> int:
        """Requests of a round that lasts as long as rounds are to last, if those are enough."""
        count = fewest = int(self.pair.fewest * load)
        trial = self.ask(arm, [Crowd(make(CHOOSING, count), load)])
        if trial.lasted_s < self.given.round_s / 2:
            # Connections and a single request count for much.
            count = min(1000, int(count * self.given.round_s / trial.lasted_s))
            trial = self.ask(arm, [Crowd(make(CHOOSING, count), load)])
        return max(fewest, int(count * self.given.round_s / trial.lasted_s))

    def in_turns(
        self, arms: Sequence[Arm], make: Turns, repeats: int | None = None
    ) -> dict[str, list[Round]]:
        """Rounds of all arms, the same requests in each; who goes first rotates."""
        self.servers.start([arm.spec for arm in arms])
        found: dict[str, list[Round]] = {arm.name: [] for arm in arms}
        for turn in range(repeats or self.given.repeats):
            crowds = make(turn)
            for arm in in_turn(arms, turn):
                found[arm.name].append(self.ask(arm, crowds))
        return found

    def warm_up(self, arms: Sequence[Arm], make: Turns) -> None:
        """Unmeasured rounds, in which control learns what this load costs."""
        for turn in range(self.given.warm_up_rounds):
            for arm in arms:
                self.ask(arm, make(turn))

    def best_length(
        self, fixed: Arm, make: Turns, speed: Callable[[Sample], float]
    ) -> tuple[Arm, dict[int, float]]:
        """The fastest of the lengths on the half of the prompts that is kept for choosing."""
        arms = {length: fixed.limited(length) for length in self.given.lengths}
        rounds = self.in_turns(list(arms.values()), make, self.given.choosing_rounds)
        speeds = {length: speed(rounds[arm.name]) for length, arm in arms.items()}
        return arms[max(speeds, key=lambda length: speeds[length])], speeds

    def bar(self, case: str, what: str, measured: Ratio, wanted: float, off: Ratio | None = None,
            low: float = 0.0) -> None:  # fmt: skip
        """Hold a ratio against its bar and print it; `off` is the same ratio of two off servers."""
        resolution = 0.0 if off is None else max(off.high, 1.0 / off.low) - 1.0
        self.bars.append(
            Bar(case=case, what=what, wanted=wanted, wanted_low=low, measured=measured,
                resolution=resolution)
        )  # fmt: skip
        print(self.bars[-1], flush=True)

    def against_off(
        self, case: str, where: str, rounds: Mapping[str, list[Round]], wanted: dict[str, float]
    ) -> dict[str, Ratio]:
        """Bars of control over off in the same run, for each named speed."""
        found = {}
        for name, least in wanted.items():
            apart = compare(name, rounds["off again"], rounds["off"])
            found[name] = compare(name, rounds["control"], rounds["off"])
            self.bar(case, f"{where}, {name} over off", found[name], least, apart)
            found[f"off/off {name}"] = apart
        return found

    def crowds(self, first: int, count: int, load: int, make: Asks | None = None) -> Turns:
        """Turns of so many requests from a first number on; None: the pair's own."""
        make = make or self.asks
        return lambda turn: [Crowd(make(first + turn * count, count), load)]

    def cold(self, off: Arm, control: Arm, make: Turns) -> float:
        """Control over off in their first rounds, before anything was learnt of this load."""
        found = self.in_turns([off, control], make, 1)
        return found["control"][0].tokens_per_s / found["off"][0].tokens_per_s

    def over_off(
        self,
        case: str,
        control: Arm,
        loads: Sequence[int],
        wanted: dict[str, float],
        make: Asks | None = None,
    ) -> dict[str, Any]:
        """A case in which control is held against off alone; `make` gives requests."""
        results, (off, again) = {}, self.off()
        self.servers.start([off.spec, again.spec, control.spec])
        for load in loads:
            count = self.size(off, load, make or self.asks)
            choosing = self.crowds(CHOOSING, count, load, make)
            first = self.cold(off, control, choosing)
            self.warm_up([control], choosing)
            measured = self.crowds(MEASURED, count, load, make)
            rounds = self.in_turns([off, again, control], measured)
            self.forget()
            where = f"{load} in flight"
            title = f"{case}, {where}, {count} requests a round; control's first round"
            arms = show_arms(f"{title} {first:.2f} of off", rounds)
            results[where] = {
                "requests a round": count,
                "first round over off": first,
                "arms": arms,
                "ratios": self.against_off(case, where, rounds, wanted),
            }
        return results
