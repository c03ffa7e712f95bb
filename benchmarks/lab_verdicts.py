"""How often the default policy says SHIP, over simulated experiments whose truth is known.

    python benchmarks/lab_verdicts.py --experiments 1500

Every law of `foretoken.lab.stats.simulator`, with the sample of `lab ab`, 9 blocks of 120 requests,
and what the verdict asks for, up to 2,000 requests an arm and five looks. Asked for: SHIP in at
most 5 % at a true 1.30x, the policy's limit, at the first look and over all; in at least 90 % at
1.60x; never where a class loses. Nothing is timed: any machine gives the same numbers.
"""

import argparse
import json
from dataclasses import replace
from statistics import median

from foretoken.lab.decide.rehearsal import SimulatedExperiment, play, shares_of_ship
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.decide.verdict import DO_NOT_SHIP
from foretoken.lab.stats.simulator import LAWS

LIMIT, ABOVE = 1.3, 1.6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1500)
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as in decide")
    given = parser.parse_args()
    policy, results = load_policy(None, tuple(given.changes)), []
    for name in given.laws:
        at = {}
        for speedup in (LIMIT, ABOVE):
            experiment = SimulatedExperiment(law=replace(LAWS[name], speedup=speedup))
            at[speedup] = [play(policy, experiment, seed) for seed in range(given.experiments)]
        first, ever = shares_of_ship(at[LIMIT])
        row = {
            "law": name,
            "ship_at_limit_first_look": first,
            "ship_at_limit": ever,
            "ship_above": shares_of_ship(at[ABOVE])[1],
            "turned_down_above": sum(p.verdict == DO_NOT_SHIP for p in at[ABOVE])
            / given.experiments,
            "split_named": sum("split" in p.sentence.lower() for p in at[ABOVE])
            / given.experiments,
            "median_requests": 120 * median(p.blocks for p in at[ABOVE]),
        }
        print(
            f"| {name} | {first:.1%} | {ever:.1%} | {row['ship_above']:.1%} | "
            f"{row['turned_down_above']:.1%} | {row['split_named']:.1%} | "
            f"{row['median_requests']:.0f} |",
            flush=True,
        )
        results.append(row)
    print(json.dumps({"benchmark": "lab_verdicts", "policy": policy.name, "results": results}))


if __name__ == "__main__":
    main()
