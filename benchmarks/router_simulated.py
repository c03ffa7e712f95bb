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
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count, repeat
from random import Random
from statistics import median, quantiles
from typing import Any, NamedTuple, final

from common import announce, finish, make_parser

from benchmarks.simulate.machine import SimulatedMachine, planned_machine
from foretoken.control.cost import StepShape
from foretoken.kv.pool import PagePool
from foretoken.lab.plan.setup import PlanSettings
from foretoken.router.choosing import choose
from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import ReplicaView
from foretoken.runtime.batch import SpanVerification, Verification
from foretoken.runtime.scheduling.scheduler import Scheduler, SchedulerConfig
from foretoken.types import Request, SamplingParams
from foretoken.types.fingerprint import Fingerprint

POLICIES = ("random", "turns", "least", "prefix")
REPLICAS = (1, 4, 16, 64)
USERS = (32, 96)
"""Of each replica."""
STARTS, SECONDS = 3, 90.0
SKIP = 1 / 3
"""Share of the time that does not count."""
REPORT_S = 0.1
PAGE, PAGES = 32, 4096
"""Of each replica: 131,072 tokens."""
VOCABULARY = 1 << 15
SCHEDULING = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1 << 16)
FINGERPRINT = Fingerprint("simulated", "simulated", "simulated")
GREEDY = SamplingParams(temperature=0.0)
HEAD = (
    "| replicas | users each | policy | found | TTFT P50 | TTFT P99 | TTFT over random's, P50, P99 "
    "| tokens/s over random's | busiest replica over the mean |\n|" + 3 * "---|" + 6 * "---:|"
)


class Turn(NamedTuple):
    tenant: str
    prompt: tuple[int, ...]
    """All of the conversation so far, and the tenant's instructions before it."""
    answer: tuple[int, ...]
    think_s: float
    """From its answer to the next turn."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """How long conversations are, in tokens unless said otherwise. Every mean but that of the
    instructions is of a geometric or exponential law."""

    tenants: int = 16
    instructions: tuple[int, int] = (200, 1600)
    """Shortest and longest; a tenant's are the same in all its conversations."""
    first: int = 300
    later: int = 80
    answer: int = 150
    turns: float = 5.0
    think_s: float = 5.0


class User:
    """One conversation after the other: the same for the same seed and number, whatever happens."""

    def __init__(self, talk: Talk, number: int, seed: int) -> None:
        self._talk, self._random = talk, Random(f"user {seed} {number}")
        # A tenth of the tenants have about a third of the users, as far as there are ten.
        place = int(talk.tenants * self._random.random() ** 2)
        self.tenant, tenant = f"tenant {place}", Random(f"tenant {seed} {place}")
        self._instructions = self._text(tenant.randint(*talk.instructions), tenant)
        self._said: tuple[int, ...] = ()
        self.first_s = self._random.uniform(0.0, 2.0 * talk.think_s)

    def turn(self) -> Turn:
        talk, random = self._talk, self._random
        if not self._said or random.random() < 1.0 / talk.turns:
            self._said = self._instructions + self._text(self._length(talk.first), random)
        else:
            self._said += self._text(self._length(talk.later), random)
        prompt, answer = self._said, self._text(self._length(talk.answer), random)
        self._said += answer
        return Turn(self.tenant, prompt, answer, random.expovariate(1.0 / talk.think_s))

    def _length(self, mean: int) -> int:
        return min(1 + int(self._random.expovariate(1.0 / mean)), 4 * mean)

    def _text(self, length: int, random: Random) -> tuple[int, ...]:
        return tuple(random.choices(range(VOCABULARY), k=length))


class Answered(NamedTuple):
    """Tokens of one request after a step."""

    request_id: str
    tokens: int
    ended: bool


class SimulatedReplica:
    """One engine without a model."""

    def __init__(self, replica_id: str, machine: SimulatedMachine, pages: int) -> None:
        self.replica_id, self._machine, self._now = replica_id, machine, 0.0
        self._scheduler = Scheduler(SCHEDULING, PagePool(pages, PAGE), clock=lambda: self._now)
        self._turns: dict[str, Turn] = {}
        self._batch: Any = None
        self._ends = 0.0
        most = SCHEDULING.max_num_batched_tokens
        one, many = (machine.target_s(StepShape(rows), 1) for rows in (1, most))
        self._step_s, self.prefill_token_s = one, (many - one) / (most - 1)

    @property
    def num_requests(self) -> int:
        return self._scheduler.num_running + self._scheduler.num_waiting

    @property
    def busy(self) -> bool:
        return self._batch is not None

    @property
    def prompt_tokens(self) -> tuple[int, int]:
        """Of all requests so far: those found in the cache, and all."""
        prefix = self._scheduler.prefix
        assert prefix is not None
        return prefix.num_hit_tokens, prefix.num_queried_tokens

    def add(self, request_id: str, turn: Turn, now: float) -> None:
        self._now = now
        self._turns[request_id] = turn
        self._scheduler.add(
            Request(
                request_id=request_id,
                prompt_token_ids=turn.prompt,
                params=GREEDY,
                seed=0,
                max_tokens=len(turn.answer),
                arrival=now,
                cache_salt=turn.tenant,
            )
        )

    def begin(self, now: float) -> float | None:
        """Begin a step; when it ends, None where there is nothing to do."""
        self._now = now
        if not self._scheduler.has_unfinished:
            return None
        self._batch = batch = self._scheduler.schedule()
        assert batch.spans, "somebody waits, and nobody runs"
        rows = sum(span.length for span in batch.spans)
        contexts = sum(span.start + span.length for span in batch.spans)
        # A step samples one token of each span but of prompts that are not read to their end.
        tokens = sum(span.samples for span in batch.spans)
        decoding = sum(span.sequence.is_decoding for span in batch.spans)
        shape = StepShape(
            rows, len(batch.spans), contexts / len(batch.spans), prompt_rows=rows - decoding
        )
        seconds = self._machine.target_s(shape, tokens)
        # What a step takes beside the prompts in it: the usual delay of whoever comes now.
        self._step_s = max(seconds - (rows - decoding) * self.prefill_token_s, 0.0)
        self._ends = now + seconds
        return self._ends

    def end(self, now: float) -> list[Answered]:
        self._now, batch = now, self._batch
        self._batch = None
        results = Verification(tuple(self._result(span) for span in batch.spans))
        answered = []
        for output in self._scheduler.commit(batch, results, now):
            ended = output.finish_reason is not None
            answered.append(Answered(output.request_id, len(output.new_token_ids), ended))
            if ended:
                del self._turns[output.request_id]
        return answered

    def _result(self, span: Any) -> SpanVerification | None:
        if not span.samples:
            return None
        answer = self._turns[span.sequence.request.request_id].answer
        done = span.sequence.num_output
        new_ids = answer[done : done + 1]
        return SpanVerification(new_ids=new_ids, num_accepted=0, num_drafted=0, sources=())

    def view(self, now: float) -> ReplicaView:
        """As it reports itself: its queue is the rest of the step, a step, and the prompt tokens
        that are not computed; of prompts that wait it expects its usual share of hits."""
        scheduler = self._scheduler
        hit, asked = self.prompt_tokens
        miss_share = 1.0 - hit / max(asked, 1)
        left = 0.0
        for sequence in scheduler.sequences.values():
            if sequence.page_table:
                left += 0 if sequence.is_decoding else sequence.num_tokens - sequence.num_computed
            else:
                left += miss_share * sequence.num_tokens
        step_s = max(self._ends - now, 0.0) + self._step_s if self.busy else 0.0
        return ReplicaView(
            replica_id=self.replica_id,
            fingerprint=FINGERPRINT,
            queue_s=step_s + left * self.prefill_token_s,
            prefill_token_s=self.prefill_token_s,
        )


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
        self.loads = Counter[str]()
        """Requests of each replica when it reported, and those it was given since."""
        for replica_id in replicas:
            self.index.add(replica_id)

    def route(self, prompt: RoutedPrompt, views: Sequence[ReplicaView]) -> tuple[str, int]:
        """The replica, and the tokens that it is known to hold."""
        if self.policy == "random":
            return self._random.choice(views).replica_id, 0
        if self.policy == "turns":
            return views[next(self._turns) % len(views)].replica_id, 0
        if self.policy == "least":
            least = min(self.loads[view.replica_id] for view in views)
            equal = [view for view in views if self.loads[view.replica_id] == least]
            return self._random.choice(equal).replica_id, 0
        route = choose(prompt, views, self.index)
        assert route.replica is not None, route.why
        self.index.store(route.replica.replica_id, prompt.names)
        return route.replica.replica_id, route.hit_tokens


@dataclass(slots=True)
class _Asked:
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
            self._router.loads[replica_id] = replica.num_requests
        self._at(now + REPORT_S, self._report)

    def _ask(self, user: User, now: float) -> None:
        turn, request_id = user.turn(), f"q{next(self._numbers)}"
        prompt = RoutedPrompt.of(turn.prompt, turn.tenant, page_size=PAGE)
        replica_id, hit = self._router.route(prompt, list(self._views.values()))
        self._views[replica_id] = self._views[replica_id].given(prompt.tokens - hit)
        self._router.loads[replica_id] += 1
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
        # The replica has computed all of this.
        self._router.index.store(asked.replica_id, said.names)
        self._at(now + turn.think_s, lambda now: self._ask(asked.user, now))


def simulated_machine() -> SimulatedMachine:
    """What a replica runs on, by data sheet."""
    return planned_machine(
        PlanSettings(
            target="meta-llama/Llama-3.3-70B-Instruct", method="none", device="h100-sxm", count=4
        )
    )


def play(case: Case, policy: str, seed: int) -> Served:
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
                    for policy in dict.fromkeys(("random", *given.policies))
                }
                for policy, starts in rows.items():
                    print(row(case, policy, starts, rows["random"]), flush=True)
                found = {name: [asdict(one) for one in starts] for name, starts in rows.items()}
                results.append({"case": asdict(case), "starts": found})
    finish("router_simulated", where, given, {"cases": results}, [])


if __name__ == "__main__":
    main()
