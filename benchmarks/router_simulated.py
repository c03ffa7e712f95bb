"""Does routing by known prefixes answer sooner than routing that does not know them? Simulated.

    python benchmarks/router_simulated.py
    python benchmarks/router_simulated.py --replicas 8 --users 16 64 --policies least prefix

Users hold conversations with 1 to 64 replicas on a virtual clock: several turns, each with all of
the conversation before it, and instructions of the tenant before that. Each user thinks between two
turns, and begins a new conversation after the last. A replica is the engine's scheduler with its
prefix cache, and its steps take what the data sheet says of Llama-3.3-70B on four H100
(`foretoken lab plan`); drafts are off. The router sees replicas as they were at their last report,
ten times a second, with what it gave them since. Policies: `random`, `turns` (round robin), `least`
(fewest requests) and `prefix` (`foretoken.router`). All have the same users.

One row for each case: of `prefix` and the others, share of the prompts' tokens that were found in
caches, TTFT in seconds (medians over starts), and throughput of output tokens over `random`. The
first third of the time does not count. Nothing is timed: any machine gives the same numbers.
"""

import heapq
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count, repeat
from random import Random
from statistics import median, quantiles
from typing import final

from common import announce, finish, make_parser
from router_replicas import PAGE, SimulatedReplica, Talk, Turn, User

from benchmarks.simulate.machine import SimulatedMachine, planned_machine
from foretoken.lab.plan.setup import PlanSettings
from foretoken.router.choosing import choose
from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import ReplicaView

POLICIES = ("random", "turns", "least", "prefix")
REPLICAS = (1, 4, 16, 64)
USERS = (32, 96)
"""Of each replica."""
STARTS, SECONDS = 3, 90.0
SKIP = 1 / 3
"""Share of the time that does not count."""
REPORT_S = 0.1
PAGES = 4096
"""Of each replica: 131,072 tokens."""
MODEL, DEVICE, DEVICES = "meta-llama/Llama-3.3-70B-Instruct", "h100-sxm", 4
HEAD = (
    "| replicas | users each | policy | found | TTFT P50 | TTFT P99 | TTFT over random's, P50, P99 "
    "| tokens/s over random's | busiest replica over the mean |\n|" + 3 * "---|" + 6 * "---:|"
)

Policy = Callable[[RoutedPrompt, Sequence[ReplicaView]], tuple[str, int]]
"""(prompt, views) -> the replica, and how many tokens of the prompt it is known to hold."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is simulated for some rows."""

    replicas: int
    users: int
    """Of each replica."""
    seconds: float = SECONDS
    talk: Talk = field(default_factory=Talk)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of one policy in one start."""

    found: float
    """Share of the prompts' tokens."""
    ttft_p50: float
    ttft_p99: float
    tokens_per_s: float
    requests: int
    unanswered: int
    """Requests without a first token at the end that had come ten seconds before."""
    busiest: float
    """Most output tokens of a replica over the mean."""


class Router:
    """One policy with what it knows."""

    def __init__(self, policy: str, replicas: Sequence[str], seed: int) -> None:
        self.policy, self.index = policy, PrefixIndex(PAGES)
        self._random, self._turns = Random(f"router {seed}"), count()
        for replica_id in replicas:
            self.index.add(replica_id)

    def route(self, prompt: RoutedPrompt, views: Sequence[ReplicaView]) -> tuple[str, int]:
        """The replica, and the tokens that it is known to hold."""
        if self.policy == "random":
            return self._random.choice(views).replica_id, 0
        if self.policy == "turns":
            return views[next(self._turns) % len(views)].replica_id, 0
        if self.policy == "least":
            least = min(view.queued + view.running for view in views)
            equal = [view for view in views if view.queued + view.running == least]
            return self._random.choice(equal).replica_id, 0
        route = choose(prompt, views, self.index)
        assert route.replica is not None, route.why
        self.index.store(route.replica.replica_id, prompt.names)
        return route.replica.replica_id, route.hit_tokens

    def learn(self, replica_id: str, prompt: RoutedPrompt) -> None:
        """A replica has computed all of this."""
        self.index.store(replica_id, prompt.names)


@dataclass(slots=True)
class _Asked:
    """A request on its way."""

    user: User
    turn: Turn
    replica_id: str
    at: float


@dataclass(slots=True)
class _Counts:
    ttft: list[float] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)
    hit: int = 0
    prompts: int = 0


class Cluster:
    """Replicas, users and a router on one clock."""

    def __init__(self, case: Case, policy: str, machine: SimulatedMachine, seed: int) -> None:
        ids = [f"r{number}" for number in range(case.replicas)]
        self._replicas = {one: SimulatedReplica(one, machine, PAGES) for one in ids}
        self._views = {one: replica.view(0.0) for one, replica in self._replicas.items()}
        self._router = Router(policy, ids, seed)
        self._skip_s, self._end_s = SKIP * case.seconds, case.seconds
        self._asked: dict[str, _Asked] = {}
        self._open: dict[str, float] = {}
        self._numbers, self._order = count(), count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._counts = _Counts(tokens=dict.fromkeys(ids, 0))
        for number in range(case.replicas * case.users):
            user = User(case.talk, number, seed)
            self._at(user.first_s, lambda now, user=user: self._ask(user, now))
        self._at(REPORT_S, self._report)
        self._at(self._skip_s, self._begin_counting)

    def run(self) -> Served:
        """All of the time."""
        while self._events and self._events[0][0] < self._end_s:
            now, _, act = heapq.heappop(self._events)
            act(now)
        counts = self._counts
        hit, asked = self._prompt_tokens()
        tokens = counts.tokens.values()
        cuts = quantiles(counts.ttft, n=100, method="inclusive")
        return Served(
            found=(hit - counts.hit) / max(asked - counts.prompts, 1),
            ttft_p50=cuts[49],
            ttft_p99=cuts[98],
            tokens_per_s=sum(tokens) / (self._end_s - self._skip_s),
            requests=len(counts.ttft),
            unanswered=sum(at < self._end_s - 10.0 for at in self._open.values()),
            busiest=max(tokens) * len(tokens) / sum(tokens),
        )

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def _prompt_tokens(self) -> tuple[int, int]:
        both = [replica.prompt_tokens for replica in self._replicas.values()]
        return sum(hit for hit, _ in both), sum(asked for _, asked in both)

    def _begin_counting(self, now: float) -> None:
        self._counts.hit, self._counts.prompts = self._prompt_tokens()

    def _report(self, now: float) -> None:
        for replica_id, replica in self._replicas.items():
            self._views[replica_id] = replica.view(now)
        self._at(now + REPORT_S, self._report)

    def _ask(self, user: User, now: float) -> None:
        turn, request_id = user.turn(), f"q{next(self._numbers)}"
        prompt = RoutedPrompt.of(turn.prompt, turn.tenant, page_size=PAGE)
        replica_id, hit = self._router.route(prompt, list(self._views.values()))
        self._views[replica_id] = self._views[replica_id].given(prompt.tokens - hit)
        self._asked[request_id] = _Asked(user, turn, replica_id, now)
        self._open[request_id] = now
        replica = self._replicas[replica_id]
        replica.add(request_id, turn, now)
        if not replica.busy:
            self._step(replica, now)

    def _step(self, replica: SimulatedReplica, now: float) -> None:
        ends = replica.begin(now)
        if ends is not None:
            self._at(ends, lambda now: self._stepped(replica, now))

    def _stepped(self, replica: SimulatedReplica, now: float) -> None:
        for request_id, tokens, ended in replica.end(now):
            if now >= self._skip_s:
                self._counts.tokens[replica.replica_id] += tokens
            began = self._open.pop(request_id, None)
            if began is not None and began >= self._skip_s:
                self._counts.ttft.append(now - began)
            if ended:
                self._answered(self._asked.pop(request_id), now)
        self._step(replica, now)

    def _answered(self, asked: _Asked, now: float) -> None:
        turn = asked.turn
        said = RoutedPrompt.of(turn.prompt + turn.answer, turn.tenant, page_size=PAGE)
        self._router.learn(asked.replica_id, said)
        self._at(now + turn.think_s, lambda now: self._ask(asked.user, now))


def simulated_machine() -> SimulatedMachine:
    """What a replica runs on, by data sheet."""
    return planned_machine(PlanSettings(target=MODEL, method="none", device=DEVICE, count=DEVICES))


def play(case: Case, policy: str, seed: int) -> Served:
    """One policy in one start."""
    return Cluster(case, policy, simulated_machine(), seed).run()


def row(case: Case, policy: str, starts: Sequence[Served], base: Sequence[Served]) -> str:
    """A row of the table; `base` are the same starts with `random`."""

    def over(name: str) -> float:
        both = zip(starts, base, strict=True)
        return median(getattr(one, name) / getattr(other, name) for one, other in both)

    def middle(name: str) -> float:
        return median(getattr(one, name) for one in starts)

    return (
        f"| {case.replicas} | {case.users} | {policy} | {middle('found'):.0%} | "
        f"{middle('ttft_p50'):.3f} | {middle('ttft_p99'):.3f} | "
        f"{over('ttft_p50'):.2f}, {over('ttft_p99'):.2f} | {over('tokens_per_s'):.3f} | "
        f"{middle('busiest'):.2f} |"
    )


def chosen_policies(given: Namespace) -> list[str]:
    """Those that were asked for, and the one that they are held against first."""
    return ["random", *(one for one in given.policies if one != "random")]


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(repeats=STARTS)
    parser.add_argument("--replicas", type=int, nargs="+", default=list(REPLICAS), metavar="N")
    parser.add_argument(
        "--users", type=int, nargs="+", default=list(USERS), help="of each replica", metavar="N"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the virtual clock")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    given = parser.parse_args()
    if given.quick:
        given.repeats, given.seconds = 1, 15.0
        given.replicas, given.users = [2], [8]
    where = announce(given, timed=False)
    print(HEAD)
    results = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for replicas in given.replicas:
            for users in given.users:
                case = Case(replicas=replicas, users=users, seconds=given.seconds)
                rows = {
                    policy: list(pool.map(play, repeat(case), repeat(policy), range(given.repeats)))
                    for policy in chosen_policies(given)
                }
                for policy, starts in rows.items():
                    print(row(case, policy, starts, rows["random"]), flush=True)
                found = {name: [asdict(one) for one in starts] for name, starts in rows.items()}
                results.append({"case": asdict(case), "starts": found})
    finish("router_simulated", where, given, {"cases": results}, [])


if __name__ == "__main__":
    main()
