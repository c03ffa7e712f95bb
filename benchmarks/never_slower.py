"""Is control slower than no speculation, or than the best fixed length, at any load, for anyone?

    python benchmarks/never_slower.py
    python benchmarks/never_slower.py --pair MODELS

Each arm is a server of its own, kept beside the others and idle unless it is its turn: `off` and
`off again`, started without speculation; `fixed k`, which drafts k tokens at any load, k chosen by
throughput on other prompts; `control`, which decides by itself. Arms take turns with the same
requests, held-out code at temperature 0.8 with a seed (--temperatures: another, or several in
turns; a pair from a folder accepts alike at 0 and 0.8, and has both). All their tokens have to be
the same. Ratios are of speeds: above 1 control is faster. Behind each stands by how much the two
off servers differed; a bar is missed only beyond it, and `noise` is what is below the bar but
within. Clients are one light process on the same cores; its share is printed.

Cases: steady (constant number in flight), retrieval (long prompts, short answers), mix (two classes
in a batch), useless (a drafter that is never right), drift (acceptance 0.9, 0, 0.9 in an answer),
json (all requests with a schema), ramp (1, 64 and 1 clients), contexts (long ones), resting (all
drafters off), deciding (what deciding takes of a step), simulated (does the simulator say what the
servers do?).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import never_slower_cases as cases
import never_slower_simulated as simulated
import never_slower_steered as steered
from common import Goal, announce, at_most, finish, make_parser
from never_slower_arms import Pair, Servers, demo_pair, folder_pair
from never_slower_bench import Bench

DECIDING_SHARE = 0.005
LONG_CONTEXT = 8704
COARSE = 0.05
"""A resolution beyond which a bar says little."""


def deciding(bench: Bench) -> dict[str, Any]:
    """What deciding takes of a step of 64 sequences."""
    script = Path(__file__).with_name("never_slower_deciding.py")
    quick = ["--quick"] if bench.given.quick else []
    command = [sys.executable, str(script), *quick]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"\ndeciding, 64 sequences: {100 * found['share']:.2f} % of a step of "
          f"{found['step_us_p50']:.0f} us; median {found['deciding_us_p50']:.1f} us, "
          f"P99 {found['deciding_us_p99']:.1f} us (wanted < {100 * DECIDING_SHARE:g} %)",
          flush=True)  # fmt: skip
    return found


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be measured, and how fast it goes here."""

    given: argparse.Namespace
    pair: Pair
    rows_per_s: float
    """Tokens read and written per second in a batch."""

    def rounds_s(self, loads: Sequence[int], each: int, tokens: float = 0.0) -> float:
        """`each` rounds at every load, of requests of so many tokens (0: the pair's); those of high
        loads last longer than rounds are to last."""
        mean = tokens or self.pair.prompt_tokens + sum(self.pair.tokens) / 2
        many = self.pair.fewest * mean / self.rows_per_s
        return sum(each * max(float(self.given.round_s), load * many) for load in loads)


@dataclass(frozen=True, slots=True)
class Case:
    """A case, and about how many seconds it takes."""

    run: Callable[[Bench], dict[str, Any]]
    seconds: Callable[[Job], float]


def _steady_s(job: Job) -> float:
    given = job.given
    each = 4 * given.repeats + len(given.lengths) * given.choosing_rounds
    each += (1 + job.pair.second_off) * given.warm_up_rounds + 3
    return job.rounds_s(given.loads, each)


def _three_arms_s(job: Job, loads: Sequence[int]) -> float:
    each = (2 + job.pair.second_off) * job.given.repeats + job.given.warm_up_rounds + 3
    return job.rounds_s(loads, each) + 10


def _retrieval_s(job: Job) -> float:
    length = min(int(job.given.retrieval_tokens), job.pair.context - 34) + 32
    each = 3 * int(job.given.repeats) + int(job.given.warm_up_rounds) + 2
    return job.rounds_s(job.given.retrieval_loads, each, length)


def _mix_s(job: Job) -> float:
    given = job.given
    each = 3 * given.repeats + given.warm_up_rounds + 1
    each += (1 + len(given.lengths)) * given.choosing_rounds + given.repeats
    return job.rounds_s([given.mix_load], each) + 10


def _drift_s(job: Job) -> float:
    given = job.given
    each = 5 * given.repeats + 2 * len(given.lengths) * given.choosing_rounds + 3
    tokens, loads = each * 3 * int(given.drift_tokens), given.drift_loads
    # Small batches read the weights for few tokens: eight at once are taken to use all the speed.
    return float(sum(tokens * max(load, 8) / job.rows_per_s for load in loads)) + 20


def _simulated_s(job: Job) -> float:
    each = (len(job.given.lengths) + 5) * int(job.given.repeats) + 2
    return job.rounds_s(job.given.simulated_loads, each) + 20


def _ramp_s(job: Job) -> float:
    return float(9 * (job.given.window_repeats + 0.2) * (job.given.window_s + 0.2))


def _contexts_s(job: Job) -> float:
    given, arms = job.given, 2 + job.pair.second_off
    reading = arms * max(given.context_loads) * min(given.context_tokens, job.pair.context)
    windows = len(given.context_loads) * (3 * given.window_repeats + 2)
    return float(reading / job.rows_per_s + windows * given.window_s) + 20


CASES: dict[str, Case] = {
    "steady": Case(cases.steady, _steady_s),
    "retrieval": Case(cases.retrieval, _retrieval_s),
    "mix": Case(steered.mix, _mix_s),
    "useless": Case(steered.useless, lambda job: _three_arms_s(job, job.given.useless_loads)),
    "drift": Case(steered.drift, _drift_s),
    "json": Case(cases.all_json, lambda job: _three_arms_s(job, job.given.json_loads)),
    "ramp": Case(cases.ramp, _ramp_s),
    "contexts": Case(cases.contexts, _contexts_s),
    "resting": Case(cases.resting, lambda job: _three_arms_s(job, job.given.resting_loads) + 10),
    "deciding": Case(deciding, lambda _: 20.0),
    "simulated": Case(simulated.simulated, _simulated_s),
}
USUAL: dict[bool, dict[str, Any]] = {
    True: {
        "cases": [name for name in CASES if name != "contexts"],
        "loads": [1, 2, 4, 8, 16, 32, 64, 96],
        "lengths": [1, 2, 4],
        "round_s": 1.3,
        "repeats": 6,
        "choosing_rounds": 2,
        "warm_up_rounds": 2,
        "retrieval_loads": [1, 8],
        "context_loads": [1, 4],
    },
    False: {
        "cases": ["steady", "retrieval", "contexts"],
        "loads": [1, 4, 16],
        "lengths": [1, 2, 4],
        "round_s": 3.5,
        "repeats": 5,
        "choosing_rounds": 1,
        "warm_up_rounds": 1,
        "retrieval_loads": [1],
        "context_loads": [1, 4],
    },
}
"""Settings of the packaged pair, and of one from two folders."""
LOADS: dict[str, list[int] | None] = {
    "retrieval": None,
    "context": None,
    "json": [1, 16, 64],
    "useless": [1, 8, 64],
    "drift": [1, 8],
    "resting": [1, 8, 64],
    "simulated": [1, 8, 64],
}
"""Requests in flight of the other cases; None: as is usual for the pair."""


def parse() -> argparse.Namespace:
    """The command line, completed with what is usual for the pair."""
    parser = make_parser(__doc__)
    parser.add_argument("--pair", default="demo", help="demo, or the folder of make_models.py")
    parser.add_argument("--target", default="cycle-target", help="in that folder; %(default)s")
    parser.add_argument("--draft", default="cycle-draft-80", help="in that folder; %(default)s")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--loads", nargs="+", type=int, help="requests in flight of `steady`")
    parser.add_argument("--lengths", nargs="+", type=int, help="drafts a step of fixed arms")
    parser.add_argument("--control-config", type=json.loads, metavar="JSON",
                        help="speculative_config of control; default: the fixed arm's")  # fmt: skip
    parser.add_argument("--temperatures", nargs="+", type=float, help="of requests, in turns")
    parser.add_argument("--round-s", type=float, help="about how long a round lasts")
    parser.add_argument("--choosing-rounds", type=int, help="for each fixed length")
    parser.add_argument("--warm-up-rounds", type=int, help="of control at each load")
    for case, loads in LOADS.items():
        parser.add_argument(f"--{case}-loads", nargs="+", type=int, default=loads)
    parser.add_argument("--mix-load", type=int, default=8, help="half of each class")
    parser.add_argument("--retrieval-tokens", type=int, default=2000)
    parser.add_argument("--context-tokens", type=int, default=8000)
    parser.add_argument("--drift-tokens", type=int, default=480, help="of each of three parts")
    parser.add_argument("--drift-steps", type=int, default=32, help="given to control to notice")
    parser.add_argument("--pass-ms", type=float, default=0.1, help="of a steered draft")
    parser.add_argument("--ramp-clients", type=int, default=64)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--window-repeats", type=int, default=5)
    parser.set_defaults(repeats=None)
    given = parser.parse_args()
    for name, value in USUAL[given.pair == "demo"].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    return quickened(given) if given.quick else given


def quickened(given: argparse.Namespace) -> argparse.Namespace:
    """The smallest sizes that run everything."""
    given.repeats, given.round_s, given.choosing_rounds, given.warm_up_rounds = 2, 0.2, 1, 1
    given.loads, given.lengths = given.loads[:2], given.lengths[-2:]
    for name in LOADS:
        setattr(given, f"{name}_loads", getattr(given, f"{name}_loads")[:2])
    given.drift_tokens, given.drift_steps = 80, 8
    given.window_s, given.window_repeats, given.ramp_clients = 0.5, 2, 8
    given.retrieval_tokens = min(given.retrieval_tokens, 400)
    given.context_tokens = min(given.context_tokens, 600)
    return given


def estimate(bench: Bench) -> None:
    """Measure the speed of this machine, and print about how long each case will take."""
    given, pair = bench.given, bench.pair
    job = Job(given, pair, bench.rows_per_s())
    seconds = {name: CASES[name].seconds(job) for name in given.cases}
    parts = ", ".join(f"{name} {value / 60:.1f}" for name, value in seconds.items())
    total = (sum(seconds.values()) + pair.start_s) / 60
    print(f"about {total:.0f} minutes at {job.rows_per_s:.0f} tokens/s, read and written: {parts}",
          flush=True)  # fmt: skip


def measure(given: argparse.Namespace, pair: Pair, scratch: Path) -> tuple[Bench, dict[str, Any]]:
    results: dict[str, Any] = {"seconds": {}}
    with Servers(pair) as servers:
        bench = Bench(given=given, pair=pair, servers=servers, scratch=scratch)
        estimate(bench)
        for name in given.cases:
            began = time.monotonic()
            results[name] = CASES[name].run(bench)
            bench.forget()
            results["seconds"][name] = time.monotonic() - began
    results["answers"] = {"compared": bench.num_answers, "different": bench.different[:20]}
    results["client_share_of_a_core"] = bench.client_share()
    results["idle_servers_share_of_a_core"] = servers.idle_share
    results["bars"] = [{**asdict(bar), "verdict": bar.verdict} for bar in bench.bars]
    return bench, results


def goals_of(bench: Bench, results: dict[str, Any]) -> list[Goal]:
    """The bars; the same tokens everywhere; deciding."""
    goals = [bar.goal() for bar in bench.bars]
    goals.append(at_most("answers that differ between arms", len(bench.different), 0))
    if "deciding" in results:
        share = results["deciding"]["share"]
        goals.append(at_most("deciding: share of a step at batch 64", share, DECIDING_SHARE))
    return goals


def main() -> int:
    given = parse()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        pair = demo_pair()
        if given.pair != "demo":
            folder = Path(given.pair)
            pair = folder_pair(folder / given.target, folder / given.draft, LONG_CONTEXT, scratch)
        if given.temperatures:
            pair = replace(pair, temperatures=tuple(given.temperatures))
        where = announce(given)
        print("clients: coroutines of this process, on the same cores as the servers")
        if not pair.second_off:
            print(
                f"{pair.most_servers} servers at once: `off again` is the same server, asked twice"
            )
        bench, results = measure(given, pair, scratch)
    print(f"\nclients took {bench.client_share():.2f} of a core, waiting servers at most "
          f"{results['idle_servers_share_of_a_core']:.3f}; {bench.num_answers} answers compared, "
          f"{len(bench.different)} differ")  # fmt: skip
    coarse = sum(bar.resolution > COARSE for bar in bench.bars)
    if coarse:
        print(f"two off servers differed by more than {100 * COARSE:.0f} % at {coarse} of "
              f"{len(bench.bars)} bars: those need a quieter machine")  # fmt: skip
    goals = goals_of(bench, results)
    finish("never_slower", where, given, results, goals)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
