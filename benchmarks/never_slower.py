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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import never_slower_cases as cases
from common import announce, at_most, finish, make_parser
from never_slower_arms import Servers, demo_pair, folder_pair
from never_slower_bench import Bench
from never_slower_simulated import simulated

DECIDING_SHARE = 0.005
CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "steady": cases.steady,
    "retrieval": cases.retrieval,
    "mix": cases.mix,
    "useless": cases.useless,
    "drift": cases.drift,
    "json": cases.all_json,
    "ramp": cases.ramp,
    "contexts": cases.contexts,
    "resting": cases.resting,
    "deciding": cases.deciding,
    "simulated": simulated,
}
USUAL: dict[bool, dict[str, Any]] = {
    True: {
        "cases": [name for name in CASES if name != "contexts"],
        "loads": [1, 2, 4, 8, 16, 32, 64, 96],
        "round_s": 1.3,
        "repeats": 6,
        "choosing_rounds": 2,
        "warm_up_rounds": 2,
        "retrieval_loads": [1, 8],
    },
    False: {
        "cases": ["steady", "retrieval", "contexts"],
        "loads": [1, 4, 16],
        "round_s": 3.5,
        "repeats": 5,
        "choosing_rounds": 1,
        "warm_up_rounds": 1,
        "retrieval_loads": [1],
    },
}
"""Settings of the packaged pair, and of one from two folders."""
LOADS: dict[str, list[int] | None] = {
    "retrieval": None,
    "context": [1, 4],
    "json": [1, 16, 64],
    "useless": [1, 8, 64],
    "drift": [1, 8],
    "resting": [1, 8, 64],
    "simulated": [1, 8, 64],
}
"""Requests in flight of the other cases; None: as is usual for the pair."""
SIZES = {
    "mix_load": 8,  # half of each class
    "retrieval_tokens": 2000, "context_tokens": 8000,
    "drift_tokens": 480,  # of each of three parts
    "drift_steps": 32,  # given to control to notice
    "pass_ms": 0.1,  # of a steered draft
    "ramp_clients": 64,
    "window_s": 5.0,  # of decoding at long contexts
}  # fmt: skip
"""Of the cases."""
QUICK = {
    "repeats": 2, "round_s": 0.2, "choosing_rounds": 1, "warm_up_rounds": 1, "drift_tokens": 80,
    "drift_steps": 8, "window_s": 0.5, "ramp_clients": 8, "retrieval_tokens": 400,
    "context_tokens": 600,
}  # fmt: skip
"""The smallest sizes that run everything."""


def parse() -> argparse.Namespace:
    """The command line, completed with what is usual for the pair."""
    parser = make_parser(__doc__)
    parser.add_argument("--pair", default="demo", help="demo, or the folder of make_models.py")
    parser.add_argument("--target", default="cycle-target", help="in that folder; %(default)s")
    parser.add_argument("--draft", default="cycle-draft-80", help="in that folder; %(default)s")
    parser.add_argument("--cases", nargs="+", choices=CASES)
    parser.add_argument("--loads", nargs="+", type=int, help="requests in flight of `steady`")
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 4], help="of fixed arms")
    parser.add_argument("--control-config", type=json.loads, metavar="JSON",
                        help="speculative_config of control; default: the fixed arm's")  # fmt: skip
    parser.add_argument("--temperatures", nargs="+", type=float, help="of requests, in turns")
    parser.add_argument("--round-s", type=float, help="about how long a round lasts")
    parser.add_argument("--choosing-rounds", type=int, help="for each fixed length")
    parser.add_argument("--warm-up-rounds", type=int, help="of control at each load")
    for case, loads in LOADS.items():
        parser.add_argument(f"--{case}-loads", nargs="+", type=int, default=loads)
    parser.set_defaults(repeats=None, **SIZES)
    given = parser.parse_args()
    for name, value in USUAL[given.pair == "demo"].items():
        if getattr(given, name) is None:
            setattr(given, name, value)
    if given.quick:
        vars(given).update(QUICK)
        given.loads, given.lengths = given.loads[:2], given.lengths[-2:]
        for name in LOADS:
            setattr(given, f"{name}_loads", getattr(given, f"{name}_loads")[:2])
    return given


def main() -> int:
    given = parse()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        pair = demo_pair()
        if given.pair != "demo":
            folder = Path(given.pair)
            pair = folder_pair(folder / given.target, folder / given.draft)
        if given.temperatures:
            pair = replace(pair, temperatures=tuple(given.temperatures))
        where = announce(given)
        print("clients: coroutines of this process, on the same cores as the servers")
        if not pair.second_off:
            print("`off again` is the same server, asked twice: there is no memory for another")
        results: dict[str, Any] = {"seconds": {}}
        with Servers(pair) as servers:
            bench = Bench(given=given, pair=pair, servers=servers, scratch=scratch)
            for name in given.cases:
                began = time.monotonic()
                results[name] = CASES[name](bench)
                bench.forget()
                results["seconds"][name] = time.monotonic() - began
    share, different = statistics.median(bench.client_shares or [0.0]), bench.different
    print(f"\nclients took {share:.2f} of a core; {bench.num_answers} answers compared, "
          f"{len(different)} differ")  # fmt: skip
    results["answers"] = {"compared": bench.num_answers, "different": different[:20]}
    results["client_share_of_a_core"] = share
    results["bars"] = [{**asdict(bar), "verdict": bar.verdict} for bar in bench.bars]
    goals = [bar.goal() for bar in bench.bars]
    goals.append(at_most("answers that differ between arms", len(different), 0))
    if "deciding" in results:
        spent = results["deciding"]["share"]
        goals.append(at_most("deciding: share of a step at batch 64", spent, DECIDING_SHARE))
    finish("never_slower", where, given, results, goals)
    return 0 if all(goal.met for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
