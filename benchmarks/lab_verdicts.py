"""How often the default policy says USE IT, over simulated experiments whose truth is known.

    python benchmarks/lab_verdicts.py --experiments 1500
    python benchmarks/lab_verdicts.py --experiments 300 --losing 0.5 0.55 0.6

Every law of `benchmarks.simulate.ab_draws`, with the sample of `lab ab`, 9 blocks of 120 requests,
and what the verdict asks for, up to 2,000 requests an arm and five looks. Asked for: USE_IT in at
most 5 % at a true 1.30x, the policy's limit, at the first look and over all; in at least 90 % at
1.60x; never where a class loses. With `--losing` only that law is played, at a true 1.60x over all,
with a class that gains so many times what it would without classes: how large has its loss to be
for the verdict to name it? Nothing is timed: any machine gives the same numbers.
"""

import argparse
import json
from dataclasses import replace
from statistics import fmean, median

import common  # noqa: F401  (it makes the packages beside it known)

from benchmarks.simulate.ab_draws import LAWS, true_class_gain
from benchmarks.simulate.decide_rehearsal import SimulatedExperiment, play, shares_of_ship
from foretoken.lab.decide.ship_policy import ShipPolicy, load_policy
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT

LIMIT, ABOVE = 1.3, 1.6
SPLIT = "one class loses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1500)
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as in decide")
    parser.add_argument("--losing", nargs="+", type=float, metavar="GAIN")
    given = parser.parse_args()
    policy, results = load_policy(None, tuple(given.changes)), []
    if given.losing:
        for gain in given.losing:
            print_losing(policy, gain, given.experiments)
        return
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
            "turned_down_above": fmean(p.verdict == LEAVE_IT_OFF for p in at[ABOVE]),
            "split_named": fmean("split" in p.sentence.lower() for p in at[ABOVE]),
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


def print_losing(policy: ShipPolicy, gain: float, experiments: int) -> None:
    """A row: the class's true gain, and what verdicts say of it."""
    law = replace(LAWS[SPLIT], speedup=ABOVE)
    loses = replace(law.classes[-1], gain=gain)
    law = replace(law, classes=(*law.classes[:-1], loses))
    found = [play(policy, SimulatedExperiment(law=law), seed) for seed in range(experiments)]
    named = sum(loses.name in p.sentence and "split" in p.sentence for p in found)
    words = (USE_IT, MEASURE_MORE, LEAVE_IT_OFF)
    shares = [sum(p.verdict == word for p in found) for word in words]
    cells = [f"{share / experiments:.1%}" for share in (named, *shares)]
    print(f"| {true_class_gain(law, loses.name):.2f}x | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
