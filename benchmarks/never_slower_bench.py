"""What the cases of `never_slower.py` share: arms, rounds in turns, sizes of rounds, identity."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import Ratio
from never_slower_arms import Arm, Pair, Servers, plain_ask
from never_slower_bars import Bar, compare, resolution, show_arms
from never_slower_drafter import Stream, write_streams
from never_slower_load import Ask, Crowd, Reply, Round

from foretoken.lab.stats.repeats import in_turn

CHOOSING, MEASURED, TAUGHT, LONG = (half * 1_000_000 for half in range(4))
"""First numbers of prompts: what a length is chosen on is not what is measured."""
ESTIMATED = 16
"""Requests by which it is estimated how long a run takes."""
CACHED, UNCACHED = "--enable-prefix-caching", "--no-enable-prefix-caching"
Asks = Callable[[int, int], list[Ask]]
"""Requests from a first number, and how many."""
Turns = Callable[[int], Sequence[Crowd]]
"""The requests of a turn."""


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
    def most(self) -> int:
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

    def fixed(self, cache: str = UNCACHED) -> Arm:
        """Drafts at any load, as far as its requests say."""
        spec = self.pair.drafted(self._drafting(), cache, "--no-adaptive-speculation")
        return Arm(name="fixed", spec=spec)

    def _drafting(self) -> dict[str, Any]:
        return {**self.pair.drafting, "num_speculative_tokens": self.most}

    def steered(self, name: str, streams: Sequence[Stream]) -> tuple[Arm, Arm]:
        """Two servers with a drafter that does as told: adaptive, and at fixed lengths."""
        path = self.scratch / f"{name}.json"
        write_streams(path, streams, self.given.pass_ms / 1e3)
        specs = [self.pair.steered(path, self.most, UNCACHED, *more)
                 for more in ((), ("--no-adaptive-speculation",))]  # fmt: skip
        return Arm(name="control", spec=specs[0]), Arm(name="fixed", spec=specs[1])

    def asks(self, first: int, count: int) -> list[Ask]:
        return [plain_ask(self.pair, first + i) for i in range(count)]

    def ask(self, arm: Arm, crowds: Sequence[Crowd]) -> Round:
        """One round, whose tokens must be those of every other arm."""
        found = self.servers.ask(arm, crowds)
        self.client_shares.append(found.client_share)
        self.check(arm.name, found.replies)
        return found

    def check(self, arm: str, replies: Sequence[Reply]) -> None:
        """Compare tokens with those that the same request was answered with before."""
        for reply in replies:
            self.num_answers += 1
            if self._tokens.setdefault(reply.ask.key, reply.ids) != reply.ids:
                self.different.append(f"{arm}, {reply.ask.key}")

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

    def rows_per_s(self) -> float:
        """Tokens that are read and written per second without drafts, 16 requests in flight."""
        off, _ = self.off()
        for first in (0, ESTIMATED):  # the first round warms up
            asks = self.asks(TAUGHT + first, ESTIMATED)
            found = self.servers.ask(off, [Crowd(asks, ESTIMATED)])
        rows = sum(len(ask.body["prompt"]) + ask.body["max_tokens"] for ask in asks)
        return rows / found.lasted_s

    def best_length(
        self, fixed: Arm, make: Turns, speed: Callable[[Sequence[Round]], float]
    ) -> tuple[Arm, dict[int, float]]:
        """The fastest of the lengths on the half of the prompts that is kept for choosing."""
        arms = {length: fixed.limited(length) for length in self.given.lengths}
        rounds = self.in_turns(list(arms.values()), make, self.given.choosing_rounds)
        speeds = {length: speed(rounds[arm.name]) for length, arm in arms.items()}
        return arms[max(speeds, key=lambda length: speeds[length])], speeds

    def bar(
        self,
        case: str,
        what: str,
        measured: Ratio,
        wanted: tuple[float, float | None],
        off: Ratio | None,
    ) -> Bar:
        """Hold a ratio against its bar and print it; `off` is the same ratio of two off servers."""
        bar = Bar(
            case=case,
            what=what,
            wanted=wanted[0],
            wanted_low=wanted[1],
            measured=measured,
            resolution=resolution(off),
        )
        self.bars.append(bar)
        print(bar, flush=True)
        return bar

    def against_off(
        self, case: str, where: str, rounds: Mapping[str, list[Round]], wanted: dict[str, float]
    ) -> dict[str, Ratio]:
        """Bars of control over off in the same run, for each named speed."""
        found = {}
        for name, least in wanted.items():
            apart = compare(name, rounds["off again"], rounds["off"])
            found[name] = compare(name, rounds["control"], rounds["off"])
            self.bar(case, f"{where}, {name} over off", found[name], (least, None), apart)
            found[f"off/off {name}"] = apart
        return found

    def over_off(
        self, case: str, control: Arm, load: int, make: Asks, wanted: dict[str, float]
    ) -> dict[str, Any]:
        """One load of a case in which control is held against off alone; `make` gives requests."""
        off, again = self.off()
        self.servers.start([off.spec, again.spec, control.spec])
        count = self.size(off, load, make)

        def turns(first: int) -> Turns:
            return lambda turn: [Crowd(make(first + turn * count, count), load)]

        cold = self.in_turns([off, control], turns(CHOOSING), 1)
        first = cold["control"][0].tokens_per_s / cold["off"][0].tokens_per_s
        self.warm_up([control], turns(CHOOSING))
        rounds = self.in_turns([off, again, control], turns(MEASURED))
        self.forget()
        title = f"{case}, {load} in flight, {count} requests a round; "
        arms = show_arms(f"{title}control's first round {first:.2f} of off", rounds)
        ratios = self.against_off(case, f"{load} in flight", rounds, wanted)
        return {
            "requests a round": count,
            "first round over off": first,
            "arms": arms,
            "ratios": ratios,
        }

    def client_share(self) -> float:
        """Median share of a core that the clients took."""
        return statistics.median(self.client_shares) if self.client_shares else 0.0
