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
from never_slower_load import Ask, Crowd, Reply, Round
from never_slower_steps import VARIABLE, learn, steps_of

from foretoken.lab.simulate.arms import ControlArm, FixedArm, SimulatedArm
from foretoken.lab.simulate.machine import SimulatedMachine
from foretoken.lab.simulate.server import WatchedRound, measured_server_cost
from foretoken.lab.simulate.serving import ServingLimits, SimulatedRun, SimulatedServing
from foretoken.lab.simulate.traffic import DraftChance, RecordedRequest, RequestClass, Traffic
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


@dataclass(frozen=True, slots=True)
class _Sized:
    """The rounds of one load."""

    load: int
    count: int

    def crowd(self, bench: Bench, first: int, more: Mapping[str, Any]) -> list[Crowd]:
        asks = bench.asks(first, self.count)
        return [Crowd([Ask(key=a.key, body={**a.body, **more}) for a in asks], self.load)]


def simulated(bench: Bench) -> dict[str, Any]:
    """Throughput of off, fixed lengths and control on the server and on the virtual clock."""
    found = [_written_down(bench, arm) for arm in (bench.off()[0], bench.fixed(), bench.control())]
    off, fixed, control = found
    arms = [off, *(fixed.limited(k) for k in bench.given.lengths), control]
    full = fixed.limited(bench.most)
    bench.servers.start([arm.spec for arm in found])
    sizes = [_Sized(n, bench.size(off, n, bench.asks)) for n in bench.given.simulated_loads]
    seen = _Seen()
    real: dict[int, dict[str, list[Round]]] = {
        one.load: {arm.name: [] for arm in arms} for one in sizes
    }
    _teach(bench, seen, off, [Crowd(_short(bench), 1)])
    for turn in range(bench.given.repeats):
        # The speed of a shared machine drifts: each turn has something of everything.
        for size in sizes:
            choosing = size.crowd(bench, CHOOSING + turn * MANY, {})
            sources = {"token_sources": True, "return_token_ids": False}
            shown = size.crowd(bench, CHOOSING + turn * MANY, sources)
            for arm in in_turn(arms, turn):
                _teach(bench, seen, arm, choosing)
            # These events are longer, and so is what they take: no part of what is taught.
            for reply in bench.ask(full, shown).replies:
                _add_accepted(seen.accepted, reply, bench.most)
            measured = size.crowd(bench, MEASURED + turn * MANY, {})
            for arm in in_turn(arms, turn):
                real[size.load][arm.name].append(bench.ask(arm, measured))
    bench.forget()
    tokens, page = bench.servers.kv_tokens(control.spec), 32
    for arm in found:
        bench.servers.stop(arm.spec)  # which writes its steps down
    server = measured_server_cost(seen.rounds)
    print(f"\nbetween steps {1e6 * server.step_s:.0f} us and {1e6 * server.token_s:.0f} us for "
          f"each token; a request is on its way for {1e3 * server.request_s:.2f} ms")  # fmt: skip
    machines = {
        one.load: replace(_machine(bench, seen.spans[one.load], found), server=server)
        for one in sizes
    }
    names = {one.name for machine in machines.values() for one in machine.drafters}
    classes = _classes(seen.accepted, bench.most, *names)
    limits = ServingLimits(num_pages=tokens // page, page_size=page)
    results: dict[str, Any] = {"server": server, "classes": classes}
    for size in sizes:
        print(f"\nsimulated, {size.count} requests a round; real / simulated, medians")
        for arm in arms:
            rounds = real[size.load][arm.name]
            machine = machines[size.load]
            runs = _runs(_simulated_arm(arm), machine, classes, size.load, rounds, limits)
            taught = seen.by_arm[size.load, arm.name][-len(rounds) :]
            results[f"{size.load} in flight, {arm.name}"] = _compared(
                bench, f"{size.load} in flight, {arm.name}", rounds, taught, runs
            )
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


def _teach(bench: Bench, seen: _Seen, arm: Arm, crowds: Sequence[Crowd]) -> None:
    """A round that the simulator learns from."""
    before = bench.servers.metrics(arm.spec)
    found = bench.ask(arm, crowds)
    after = bench.servers.metrics(arm.spec)

    def grown(name: str) -> float:
        return sum(counters(after, name).values()) - sum(counters(before, name).values())

    ended_s = found.began_s + found.lasted_s
    load = sum(crowd.clients for crowd in crowds)
    seen.spans.setdefault(load, []).append((found.began_s, ended_s))
    alone = len(found.replies) if load == 1 else 0
    seen.rounds.append(
        WatchedRound(
            seconds=ended_s - found.began_s,
            steps_s=grown("step_seconds"),
            steps=grown("engine_steps"),
            tokens=found.num_tokens,
            requests_alone=alone,
        )
    )
    seen.by_arm.setdefault((load, arm.name), []).append(found)


def _short(bench: Bench) -> list[Ask]:
    asks = bench.asks(CHOOSING + MANY // 2, 24)
    return [Ask(key=f"short {a.key}", body={**a.body, "max_tokens": SHORT}) for a in asks]


def _add_accepted(accepted: dict[float, list[int]], reply: Reply, most: int) -> None:
    """How many drafts each step with all of them accepted: a token's number in its step tells."""
    listed = accepted.setdefault(float(reply.ask.body["temperature"]), [])
    # The first token is the prompt's step; the last steps have fewer drafts.
    for begin, end in pairwise(reply.starts[1:]):
        if end + most < len(reply.positions):
            listed.append(end - begin - 1)


def _classes(
    accepted: Mapping[float, list[int]], most: int, drafter: str
) -> tuple[RequestClass, ...]:
    """A class for each temperature, in the order in which requests come."""
    classes = []
    for temperature in sorted(accepted, reverse=True):
        counts = accepted[temperature]
        reached = [sum(count >= depth for count in counts) for depth in range(most + 1)]
        chances = tuple((kept + 0.5) / (tried + 1.0) for tried, kept in pairwise(reached))
        print(f"temperature {temperature:g}: chances by depth "
              + ", ".join(f"{chance:.3f}" for chance in chances))  # fmt: skip
        law = DraftChance(chance=chances[0], by_depth=chances)
        name = f"{temperature:g}"
        classes.append(RequestClass(name=name, temperature=temperature, chances={drafter: law}))
    return tuple(classes)


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
        machine, drafters=tuple(replace(one, most=bench.most) for one in machine.drafters)
    )


def _simulated_arm(arm: Arm) -> SimulatedArm:
    limit = arm.extra.get("speculation", {}).get("num_speculative_tokens", 0)
    return ControlArm() if arm.name == "control" else FixedArm(limit)


def _runs(
    arm: SimulatedArm,
    machine: SimulatedMachine,
    classes: tuple[RequestClass, ...],
    load: int,
    real: Sequence[Round],
    limits: ServingLimits,
) -> list[SimulatedRun]:
    """The same rounds on the virtual clock, after two that teach control this load."""
    serving = SimulatedServing(machine, arm, limits)
    traffics = []
    for number, one in enumerate(real):
        replies = sorted(one.replies, key=lambda reply: int(reply.ask.key.split()[-1]))
        recorded = tuple(
            RecordedRequest(None, len(reply.ask.body["prompt"]), len(reply.ids))
            for reply in replies
        )
        traffics.append(
            Traffic(
                classes=classes,
                requests=len(recorded),
                clients=load,
                recorded=recorded,
                seed=number,
            )
        )
    for traffic in traffics[:2]:
        serving.run(traffic)
    return [serving.run(traffic) for traffic in traffics]


def _compared(
    bench: Bench,
    where: str,
    real: Sequence[Round],
    taught: Sequence[Round],
    runs: Sequence[SimulatedRun],
) -> dict[str, Any]:
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
    before = SPEEDS["throughput"](taught)
    print(f"  {where}: {rate[0]:.0f} / {rate[1]:.0f} tokens/s ({before:.0f} in what taught), TTFT "
          f"{1e3 / first[0]:.2f} / {1e3 / first[1]:.2f}, TPOT {1e3 / each[0]:.3f} / "
          f"{1e3 / each[1]:.3f} ms")  # fmt: skip
    ratio = rate[1] / rate[0]
    agreement = single(min(ratio, 1.0 / ratio))
    apart = compare("throughput", taught, real)
    what = f"{where}, simulated {ratio:.3f} of real, agreement"
    bench.bar("simulated", what, agreement, NEAR, single(max(apart.value, 1 / apart.value)))
    found = {name: {"real": one[0], "simulated": one[1]} for name, one in both.items()}
    return {**found, "rounds that taught over these": apart}
