"""What a front costs: `foretoken serve demo` against the same behind a front, with --replicas.

    python benchmarks/front.py [--clients 1 8 32] [--replicas 1 2]

Streams of the packaged pair at the address that clients ask. Each repeat is a start of each arm, in
rotated order, alone on the machine; in it every number of clients has --rounds rounds after one to
warm up, of which the median counts. All arms have the machine's cores: one replica has as many
threads as the server, two have half of them each. Needs Ray (`pip install 'foretoken[ray]'`).
"""

import argparse
import statistics
from typing import Any

from common import announce, finish, interleave, make_parser, ratio_of_medians
from never_slower_arms import demo_pair, plain_ask
from never_slower_bench import SPEEDS
from never_slower_load import Crowd, run_round
from served import SIZES, demo_server

ALONE = "server"
TIMES = ("TTFT P50", "TPOT P50", "throughput")
PER_CLIENT = 2


def start_and_ask(replicas: int | None, given: argparse.Namespace) -> dict[str, float]:
    """Medians over rounds by number of clients, seconds, of one start; None: without a front."""
    options = () if replicas is None else ("--replicas", str(replicas))
    pair, off = demo_pair(), {"speculation": {"enabled": given.drafts}}
    found: dict[str, float] = {}
    with demo_server(*SIZES, *options) as server:
        for clients in given.clients:
            asks = [plain_ask(pair, number) for number in range(PER_CLIENT * clients)]
            rounds = [run_round(server.url, [Crowd(asks, clients)], off)
                      for _ in range(given.rounds + 1)][1:]  # fmt: skip
            for name in TIMES:
                seconds = statistics.median(1.0 / SPEEDS[name]([one]) for one in rounds)
                found[f"{clients} clients, {name}"] = seconds
    return found


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="of each number of clients")
    parser.add_argument("--drafts", action="store_true", help="speculate as the server chooses")
    given = parser.parse_args()
    if given.quick:
        given.clients, given.repeats, given.rounds = [1, 4], 1, 1
    where = announce(given)
    arms: dict[str, Any] = {ALONE: lambda: start_and_ask(None, given)}
    for count in given.replicas:
        arms[f"replicas: {count}"] = lambda count=count: start_and_ask(count, given)
    runs = interleave(arms, given.repeats)
    results: dict[str, Any] = {}
    for name in runs[ALONE][0]:
        below = [one[name] for one in runs[ALONE]]
        results[f"{ALONE}, {name}"] = statistics.median(below)
        print(f"{name:22} {statistics.median(below) * 1e3:9.3f} ms")
        for arm in list(arms)[1:]:
            above = [one[name] for one in runs[arm]]
            ratio = ratio_of_medians(above, below)
            results |= {f"{arm}, {name}": statistics.median(above), f"{arm} / {name}": ratio}
            print(f"    {arm}: {statistics.median(above) * 1e3:9.3f} ms, times {ratio}", flush=True)
    finish("front", where, given, results, [])


if __name__ == "__main__":
    main()
