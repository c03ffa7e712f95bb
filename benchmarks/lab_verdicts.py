"""How often the default policy says SHIP, over simulated experiments whose truth is known.

    python benchmarks/lab_verdicts.py --experiments 2000

Follows every request for more blocks up to the fourth look. Asked for: SHIP in at most 5 % at a
true 1.30x, the policy's limit, and in at least 90 % at 1.43x. Nothing is timed: any machine gives
the same numbers. `--first-blocks 9 --requests 120` is what `lab ab` measures unless told otherwise.
"""

import argparse
import json
from statistics import median

from foretoken.lab.decide.rehearsal import Played, SimulatedExperiment, play
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.verdict import SHIP

LIMIT, ABOVE = 1.30, 1.43
MOST_WRONG, LEAST_RIGHT = 0.05, 0.90


def share(played: list[Played], most_looks: int = 4) -> float:
    """Of the experiments that end in SHIP within so many looks."""
    return sum(p.verdict == SHIP and p.looks <= most_looks for p in played) / len(played)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--spreads", nargs="+", type=float, default=[0.03, 0.05, 0.07, 0.10])
    parser.add_argument("--first-blocks", type=int, default=8)
    parser.add_argument("--requests", type=int, default=40, help="per block")
    given = parser.parse_args()
    policy, results = load_policy(None), []
    for spread in given.spreads:
        at = {}
        for speedup in (LIMIT, ABOVE):
            rehearsal = SimulatedExperiment(
                speedup=speedup,
                restart_sd=spread,
                first_blocks=given.first_blocks,
                requests_per_block=given.requests,
            )
            at[speedup] = [play(policy, rehearsal, seed) for seed in range(given.experiments)]
        row = {
            "restart_sd": spread,
            "ship_at_limit": share(at[LIMIT]),
            "ship_above": share(at[ABOVE]),
            "ship_above_by_second_look": share(at[ABOVE], 2),
            "median_blocks": median(p.blocks for p in at[ABOVE]),
        }
        good = row["ship_at_limit"] <= MOST_WRONG and row["ship_above"] >= LEAST_RIGHT
        print(
            f"| {spread:.0%} | {row['ship_at_limit']:.1%} | {row['ship_above']:.1%} | "
            f"{row['ship_above_by_second_look']:.1%} | {row['median_blocks']:.0f} |"
            + ("" if good else " NOT AS ASKED"),
            flush=True,
        )
        results.append(row)
    print(json.dumps({"benchmark": "lab_verdicts", "policy": policy.name, "results": results}))


if __name__ == "__main__":
    main()
