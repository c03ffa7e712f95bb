"""The case `simulated`: does the simulator say what the servers do?

What the simulator is given is learnt from rounds with other prompts, between those that are
compared. What steps and drafts take: the engine's models of time, taught with the steps that the
servers wrote down. What serving adds between steps: the servers' counters against the clock. How
drafts are accepted, by temperature and depth: the answers with the most drafts. Nothing is fitted
to the throughputs that are compared.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from never_slower_arms import BESIDE, Arm, counters
from never_slower_bench import CHOOSING, MEASURED, SPEEDS, Bench, compare, single
from never_slower_load import Ask, Crowd, Round
from never_slower_steps import VARIABLE, learn, steps_of

from benchmarks.simulate.arms import ControlArm, FixedArm
from benchmarks.simulate.machine import SimulatedMachine, WatchedRound, measured_server_cost
from benchmarks.simulate.serving import ServingLimits, SimulatedRun, SimulatedServing
from benchmarks.simulate.traffic import DraftChance, RecordedRequest, RequestClass, Traffic
from foretoken.lab.stats.repeats import in_turn

NEAR = 0.9
"""Real and simulated throughput differ by no more than a tenth."""
MANY = 10_000
"""Prompts from one turn to the next."""
SHORT = 4
"""Tokens of answers that tell requests from steps."""


@dataclass(slots=True)
class _Seen:
    """What the simulator is taught from: rounds with other prompts than those that are compared."""

    spans: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    """By load: when they began and ended."""
    rounds: list[WatchedRound] = field(default_factory=list)
    by_arm: dict[tuple[int, str], list[Round]] = field(default_factory=dict)
    """By load and arm, in turns."""
    accepted: dict[float, list[int]] = field(default_factory=dict)
    """By temperature: accepted drafts of each step that had the most."""

    def teach(self, bench: Bench, arm: Arm, crowds: Sequence[Crowd]) -> None:
        before = bench.servers.metrics(arm.spec)
        found = bench.ask(arm, crowds)
        after = bench.servers.metrics(arm.spec)

        def grown(name: str) -> float:
            return sum(counters(after, name).values()) - sum(counters(before, name).values())

        load = sum(crowd.clients for crowd in crowds)
        span = found.began_s, found.began_s + found.lasted_s
        self.spans.setdefault(load, []).append(span)
        self.rounds.append(
            WatchedRound(
                seconds=found.lasted_s,
                steps_s=grown("step_seconds"),
                steps=grown("engine_steps"),
                tokens=sum(len(one.ids) for one in found.replies),
                requests_alone=len(found.replies) if load == 1 else 0,
            )
        )
        self.by_arm.setdefault((load, arm.name), []).append(found)

    def add_accepted(self, round_: Round, most: int) -> None:
        """How many drafts each step with all of them accepted: numbers in a step tell."""
        for reply in round_.replies:
            listed = self.accepted.setdefault(float(reply.ask.body["temperature"]), [])
            # The first token is the prompt's step; the last steps have fewer drafts.
            for begin, end in pairwise(reply.starts[1:]):
                if end + most < len(reply.positions):
                    listed.append(end - begin - 1)

    def classes(self, most: int, drafter: str) -> tuple[RequestClass, ...]:
        """A class for each temperature, in the order in which requests come."""
        found = []
        for temperature, counts in sorted(self.accepted.items(), reverse=True):
            reached = [sum(count >= depth for count in counts) for depth in range(most + 1)]
            chances = tuple((kept + 0.5) / (tried + 1.0) for tried, kept in pairwise(reached))
            shown = ", ".join(f"{chance:.3f}" for chance in chances)
            print(f"temperature {temperature:g}: chances by depth {shown}")
            law = {drafter: DraftChance(chance=chances[0], by_depth=chances)}
            name = f"{temperature:g}"
            found.append(RequestClass(name=name, temperature=temperature, chances=law))
        return tuple(found)


def simulated(bench: Bench) -> dict[str, Any]:
    """Throughput of off, fixed lengths and control on the server and on the virtual clock."""
    found = [_written_down(bench, arm) for arm in (bench.off()[0], bench.fixed(), bench.control())]
    off, fixed, control = found
    arms = [off, *(fixed.limited(k) for k in bench.given.lengths), control]
    bench.servers.start([arm.spec for arm in found])
    sizes = {n: bench.size(off, n, bench.asks) for n in bench.given.simulated_loads}
    seen, real = _Seen(), dict[tuple[int, str], list[Round]]()

    def crowd(load: int, first: int, **more: Any) -> list[Crowd]:
        asks = bench.asks(first, sizes[load])
        return [Crowd([Ask(key=a.key, body={**a.body, **more}) for a in asks], load)]

    short = [Ask(key=f"short {a.key}", body={**a.body, "max_tokens": SHORT})
             for a in bench.asks(CHOOSING + MANY // 2, 24)]  # fmt: skip
    seen.teach(bench, off, [Crowd(short, 1)])
    for turn in range(bench.given.repeats):
        # The speed of a shared machine drifts: each turn has something of everything.
        for load in sizes:
            first = turn * MANY
            for arm in in_turn(arms, turn):
                seen.teach(bench, arm, crowd(load, CHOOSING + first))
            # These events are longer, and so is what they take: no part of what is taught.
            told = crowd(load, CHOOSING + first, token_sources=True, return_token_ids=False)
            seen.add_accepted(bench.ask(fixed.limited(bench.max_drafts), told), bench.max_drafts)
            for arm in in_turn(arms, turn):
                asked = bench.ask(arm, crowd(load, MEASURED + first))
                real.setdefault((load, arm.name), []).append(asked)
    bench.forget()
    tokens, page = bench.servers.kv_tokens(control.spec), 32
    for arm in found:
        bench.servers.stop(arm.spec)  # which writes its steps down
    server = measured_server_cost(seen.rounds)
    print(f"\nbetween steps {1e6 * server.step_s:.0f} us and {1e6 * server.token_s:.0f} us for "
          f"each token; a request is on its way for {1e3 * server.request_s:.2f} ms")  # fmt: skip
    limits = ServingLimits(num_pages=tokens // page, page_size=page)
    results: dict[str, Any] = {"server": server}
    for load in sizes:
        machine = replace(_machine(bench, seen.spans[load], found), server=server)
        [drafter] = {one.name for one in machine.drafters}
        classes = results["classes"] = seen.classes(bench.max_drafts, drafter)
        print(f"\nsimulated, {sizes[load]} requests a round; real / simulated, medians")
        for arm in arms:
            rounds, where = real[load, arm.name], f"{load} in flight, {arm.name}"
            limit = arm.extra.get("speculation", {}).get("num_speculative_tokens", 0)
            other = ControlArm() if arm.name == "control" else FixedArm(limit)
            runs = _runs(SimulatedServing(machine, other, limits), classes, load, rounds)
            taught = seen.by_arm[load, arm.name][-len(rounds) :]
            results[where] = _compared(bench, where, rounds, taught, runs)
    return results


def _written_down(bench: Bench, arm: Arm) -> Arm:
    """The same with a server that writes its steps down."""
    env = (
        (VARIABLE, str(bench.scratch / f"{arm.name}.steps")),
        ("XDG_CACHE_HOME", str(bench.scratch / "costs")),
        BESIDE,
    )
    spec = replace(arm.spec, module="never_slower_steps", env=(*arm.spec.env, *env))
    return replace(arm, spec=spec)


def _machine(
    bench: Bench, spans: Sequence[tuple[float, float]], arms: Sequence[Arm]
) -> SimulatedMachine:
    """What the steps of one load teach: learnt costs fade, and tell of the last load alone."""
    [kept] = (bench.scratch / "costs").rglob("*.json")
    steps = [
        step
        for arm in arms
        for step in steps_of(bench.scratch / f"{arm.name}.steps")
        if any(began <= step.at_s <= ended for began, ended in spans)
    ]
    machine = learn(steps, kept)
    return replace(
        machine,
        drafters=tuple(replace(one, max_drafts=bench.max_drafts) for one in machine.drafters),
    )


def _runs(
    serving: SimulatedServing, classes: tuple[RequestClass, ...], load: int, real: Sequence[Round]
) -> list[SimulatedRun]:
    """The same rounds on the virtual clock, after two that teach control this load."""
    traffics = []
    for seed, one in enumerate(real):
        replies = sorted(one.replies, key=lambda reply: int(reply.ask.key.split()[-1]))
        recorded = tuple(
            RecordedRequest(None, len(reply.ask.body["prompt"]), len(reply.ids))
            for reply in replies
        )
        traffics.append(Traffic(classes=classes, requests=len(recorded), clients=load,
                                recorded=recorded, seed=seed))  # fmt: skip
    for traffic in traffics[:2]:
        serving.run(traffic)
    return [serving.run(traffic) for traffic in traffics]


def _compared(
    bench: Bench,
    where: str,
    real: Sequence[Round],
    taught: Sequence[Round],
    runs: Sequence[SimulatedRun],
) -> Mapping[str, Any]:
    """Print both, and hold the throughput against the bar.

    How much the same server differed between the rounds that taught and these is the resolution.
    """
    asked = [request for run in runs for request in run.requests]
    speeds = {
        "throughput": statistics.median(run.full_tokens_per_s for run in runs),
        "TTFT P50": 1.0 / float(np.median([request.ttft for request in asked])),
        "TPOT P50": 1.0 / float(np.median([request.tpot for request in asked])),
    }
    both = {name: (SPEEDS[name](real), speed) for name, speed in speeds.items()}
    rate, first, each = both["throughput"], both["TTFT P50"], both["TPOT P50"]
    print(f"  {where}: {rate[0]:.0f} / {rate[1]:.0f} tokens/s "
          f"({SPEEDS['throughput'](taught):.0f} in what taught), TTFT "
          f"{1e3 / first[0]:.2f} / {1e3 / first[1]:.2f}, TPOT {1e3 / each[0]:.3f} / "
          f"{1e3 / each[1]:.3f} ms")  # fmt: skip
    ratio = rate[1] / rate[0]
    apart = compare("throughput", taught, real)
    what = f"{where}, simulated {ratio:.3f} of real, agreement"
    resolution = single(max(apart.value, 1 / apart.value))
    bench.bar("simulated", what, single(min(ratio, 1.0 / ratio)), NEAR, resolution)
    return {"real, simulated": both, "rounds that taught over these": apart}
