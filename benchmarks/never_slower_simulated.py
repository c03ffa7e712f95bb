"""The case `simulated`: does the simulator say what the servers do?

Everything that the simulator is given was measured or learnt by the servers themselves. What steps
and drafts take is the file of costs that the server with control leaves behind. What serving adds
between steps is the off server's own counters against its clock. How drafts are accepted, by class
and depth, is read off the answers of the server with fixed lengths. Nothing is fitted to the
throughputs that are compared.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from never_slower_arms import Arm, counters
from never_slower_bars import SPEEDS, single
from never_slower_bench import CHOOSING, MEASURED, Bench
from never_slower_load import Ask, Crowd, Reply, Round

from foretoken.lab.simulate.arms import ControlArm, FixedArm, SimulatedArm
from foretoken.lab.simulate.machine import SimulatedMachine, machine_of_costs
from foretoken.lab.simulate.server import WatchedRound, measured_server_cost
from foretoken.lab.simulate.serving import ServingLimits, SimulatedRun, SimulatedServing
from foretoken.lab.simulate.traffic import DraftChance, RecordedRequest, RequestClass, Traffic

NEAR = 0.9
"""Real and simulated throughput differ by no more than a tenth."""
MANY = 10_000
"""Prompts from one turn to the next."""
SHORT = 4
"""Tokens of answers that tell requests from steps."""
Trials = dict[float, list[tuple[int, int]]]
"""By temperature: steps with so many drafts, of which so many were accepted."""


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
    off, _ = bench.off()
    fixed, control = bench.fixed(), bench.control()
    caches = bench.scratch / "costs"
    env = (*control.spec.env, ("XDG_CACHE_HOME", str(caches)))
    control = replace(control, spec=replace(control.spec, env=env))
    arms = [off, *(fixed.limited(k) for k in bench.given.lengths), control]
    bench.servers.start([off.spec, fixed.spec, control.spec])
    sizes = [_Sized(n, bench.size(off, n, bench.asks)) for n in bench.given.simulated_loads]
    watched: list[WatchedRound] = []
    trials: Trials = {}
    rounds: dict[int, dict[str, list[Round]]] = {
        one.load: {arm.name: [] for arm in arms} for one in sizes
    }
    watched.append(_watch(bench, off, [Crowd(_short(bench), 1)]))
    for turn in range(bench.given.repeats):
        # The speed of a shared machine drifts: each turn has something of everything.
        for size in sizes:
            choosing = size.crowd(bench, CHOOSING + turn * MANY, {})
            watched.append(_watch(bench, off, choosing))
            sources = {"token_sources": True, "return_token_ids": False}
            full = fixed.limited(bench.most)
            shown = size.crowd(bench, CHOOSING + turn * MANY, sources)
            _add_trials(trials, bench.ask(full, shown).replies, bench.most)
            bench.ask(control, choosing)
            measured = size.crowd(bench, MEASURED + turn * MANY, {})
            for arm in arms[turn % len(arms) :] + arms[: turn % len(arms)]:
                rounds[size.load][arm.name].append(bench.ask(arm, measured))
    bench.forget()
    tokens, page = bench.servers.kv_tokens(control.spec), 32
    bench.servers.stop(control.spec)  # which keeps what it learnt
    machine = _machine(caches, watched, bench.most)
    classes = _classes(trials, machine.drafters[0].name)
    limits = ServingLimits(num_pages=tokens // page, page_size=page)
    found: dict[str, Any] = {"server": machine.server, "classes": classes}
    for size in sizes:
        print(f"\nsimulated, {size.load} in flight, {size.count} requests a round: tokens/s, "
              f"TTFT and TPOT P50 in ms, real / simulated")  # fmt: skip
        for arm in arms:
            real = rounds[size.load][arm.name]
            runs = _runs(_simulated_arm(arm), machine, classes, size.load, real, limits)
            found[f"{size.load} in flight, {arm.name}"] = _compared(bench, arm, size, real, runs)
    return found


def _short(bench: Bench) -> list[Ask]:
    asks = bench.asks(CHOOSING + MANY // 2, 24)
    return [Ask(key=f"short {a.key}", body={**a.body, "max_tokens": SHORT}) for a in asks]


def _watch(bench: Bench, arm: Arm, crowds: Sequence[Crowd]) -> WatchedRound:
    """A round, and what the server counted meanwhile."""
    before = bench.servers.metrics(arm.spec)
    found = bench.ask(arm, crowds)
    after = bench.servers.metrics(arm.spec)

    def grown(name: str) -> float:
        return sum(counters(after, name).values()) - sum(counters(before, name).values())

    seconds = max(reply.at_s[-1] for reply in found.replies) - found.began_s
    alone = len(found.replies) if sum(crowd.clients for crowd in crowds) == 1 else 0
    return WatchedRound(
        seconds=seconds,
        steps_s=grown("step_seconds"),
        steps=grown("engine_steps"),
        tokens=found.num_tokens,
        requests_alone=alone,
    )


def _add_trials(trials: Trials, replies: Sequence[Reply], most: int) -> None:
    """What the steps of fixed drafts accepted: a token's number in its step tells."""
    for reply in replies:
        starts = [i for i, position in enumerate(reply.positions) if position == 0]
        starts.append(len(reply.positions))
        listed = trials.setdefault(float(reply.ask.body["temperature"]), [])
        # The first token is the prompt's step; the last steps have fewer drafts.
        for begin, end in zip(starts[1:], starts[2:], strict=False):
            if end + most < len(reply.positions):
                listed.append((most, end - begin - 1))


def _classes(trials: Trials, drafter: str) -> tuple[RequestClass, ...]:
    """A class for each temperature, in the order in which requests come."""
    classes = []
    for temperature in sorted(trials, reverse=True):
        listed = trials[temperature]
        chances = []
        for depth in range(listed[0][0]):
            reached = sum(accepted >= depth for _, accepted in listed)
            kept = sum(accepted > depth for _, accepted in listed)
            chances.append((kept + 0.5) / (reached + 1.0))
        print(f"temperature {temperature:g}: chances by depth "
              + ", ".join(f"{chance:.3f}" for chance in chances))  # fmt: skip
        law = DraftChance(chance=chances[0], by_depth=tuple(chances))
        classes.append(
            RequestClass(
                name=f"{temperature:g}", temperature=temperature, chances={drafter: law}
            )
        )
    return tuple(classes)


def _machine(caches: Path, watched: Sequence[WatchedRound], most: int) -> SimulatedMachine:
    """As the server with control got to know it."""
    [path] = caches.rglob("*.json")
    server = measured_server_cost(watched)
    print(f"\nbetween steps {1e6 * server.step_s:.0f} us and {1e6 * server.token_s:.0f} us a token; "
          f"a request waits {1e3 * server.request_s:.2f} ms for its first step")  # fmt: skip
    machine = machine_of_costs(path)
    drafters = tuple(replace(one, most=most) for one in machine.drafters)
    return replace(machine, drafters=drafters, server=server)


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
    bench: Bench, arm: Arm, size: _Sized, real: Sequence[Round], runs: Sequence[SimulatedRun]
) -> dict[str, Any]:
    """Print both, and hold the throughput against the bar."""
    asked = [request for run in runs for request in run.requests]
    simulated_s = {
        "throughput": statistics.median(run.full_tokens_per_s for run in runs),
        "TTFT P50": 1.0 / float(np.median([request.ttft for request in asked])),
        "TPOT P50": 1.0 / float(np.median([request.tpot for request in asked])),
    }
    both = {name: (SPEEDS[name](real), speed) for name, speed in simulated_s.items()}
    rate, first, each = both["throughput"], both["TTFT P50"], both["TPOT P50"]
    print(f"  {arm.name:10}{rate[0]:8.0f} /{rate[1]:7.0f}"
          f"{1e3 / first[0]:9.2f} /{1e3 / first[1]:7.2f}"
          f"{1e3 / each[0]:9.3f} /{1e3 / each[1]:7.3f}")  # fmt: skip
    ratio = rate[1] / rate[0]
    what = f"{size.load} in flight, {arm.name}, simulated {ratio:.3f} of real, agreement"
    bench.bar("simulated", what, single(min(ratio, 1.0 / ratio)), (NEAR, None), None)
    return {name: {"real": one[0], "simulated": one[1]} for name, one in both.items()}
