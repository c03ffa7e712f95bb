"""Does `lab tune` find the best setting? Simulated servers whose best setting is known.

    python benchmarks/lab_tune.py --seeds 20

Sixteen servers (`simulate/tune_rehearsal.py`), each searched from nothing with as many seeds of
luck. Asked for: at least 97 % of the best speed in the median and 95 % in 95 of 100 searches, each
within its 60 minutes, and in at most one of 100 a setting that is truly slower than no speculation.
Nothing is timed: any machine gives the same numbers.
"""

import argparse
import json
from dataclasses import asdict

import common  # noqa: F401  (it makes the packages beside it known)

from benchmarks.simulate.tune_answers import SimulatedAnswers
from benchmarks.simulate.tune_rehearsal import Rehearsed, play, rehearsed_cases, summarize

MINUTES = 60.0


def cells(found: list[Rehearsed]) -> str:
    said = summarize(found)
    return (
        f"{said.median_share:.1%} | {said.near:.0%} | {said.slower:.0%} | "
        f"{said.median_minutes:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--cases", nargs="+", type=int, default=range(16), help="from 0")
    given = parser.parse_args()
    print("| server | best | gain | emitted | median of the best | at 95 % | slower | minutes |")
    print("|---|---|---|---|---|---|---|---|")
    every: list[Rehearsed] = []
    for case in (rehearsed_cases()[number] for number in given.cases):
        answers = SimulatedAnswers(case.case)
        found = [play(case, answers, seed, minutes=MINUTES) for seed in range(given.seeds)]
        emitted = sorted({one.emitted.name for one in found})
        shown = ", ".join(emitted[:3]) + (", ..." if len(emitted) > 3 else "")
        best = f"{found[0].best.name} | {found[0].best_gain:.2f}x"
        print(f"| {case.case.name} | {best} | {shown} | {cells(found)}", flush=True)
        every += found
    said = summarize(every)
    asked = "" if said.as_asked(MINUTES) else "NOT AS ASKED"
    print(f"| all, {len(every)} searches | | | | {cells(every)}", asked)
    runs = [asdict(one) for one in every]
    print(json.dumps({"benchmark": "lab_tune", "all": asdict(said), "runs": runs}))


if __name__ == "__main__":
    main()
