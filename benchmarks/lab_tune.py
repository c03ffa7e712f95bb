"""Does `lab tune` find the best setting? Simulated servers whose best setting is known.

    python benchmarks/lab_tune.py --seeds 20 --out searches.jsonl

Sixteen servers (`simulate/tune_rehearsal.py`), each searched from nothing with as many seeds of
luck. Asked for: at least 97 % of the best speed in the median and 95 % in 95 of 100 searches, each
within its 60 minutes, and in at most one of 100 a setting that is truly slower than no speculation.
Nothing is timed: any machine gives the same numbers. With `--out` every search is a line of that
file as it ends, and those that are there are not run again.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import common  # noqa: F401  (it makes the packages beside it known)

from benchmarks.simulate.tune_answers import SimulatedAnswers
from benchmarks.simulate.tune_rehearsal import (
    RehearsalSummary,
    Rehearsed,
    play,
    rehearsed_cases,
    summarize,
)
from foretoken.lab.plain import from_plain
from foretoken.lab.records.run_files import LineWriter, read_lines

MINUTES = 60.0


def row(name: str, found: list[Rehearsed]) -> str:
    """A row of the table for searches of one server."""
    emitted = sorted({one.emitted.name for one in found})
    shown = ", ".join(emitted[:3]) + (", ..." if len(emitted) > 3 else "")
    best, said = found[0], summarize(found)
    return f"| {name} | {best.best.name} | {best.best_gain:.2f}x | {shown} | {cells(said)}"


def cells(said: RehearsalSummary) -> str:
    """The last cells of a row."""
    return (
        f"{said.median_share:.1%} | {said.near:.0%} | {said.slower:.0%} | "
        f"{said.median_minutes:.0f} |"
    )


def known_searches(path: Path) -> dict[tuple[str, int, float], Rehearsed]:
    """What the file has, by server, seed and minutes."""
    rows = [row for _, row in read_lines(path)]
    found = [from_plain(Rehearsed, row["found"], str(path)) for row in rows]
    return {
        (one.case, row["seed"], row["budget"]): one for row, one in zip(rows, found, strict=True)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--cases", nargs="+", type=int, default=[], help="numbers, from 0")
    parser.add_argument("--out", type=Path, help="the file of searches to go on with")
    given = parser.parse_args()
    known = known_searches(given.out) if given.out else {}
    kept = LineWriter(given.out) if given.out else None
    print("| server | best | gain | emitted | median of the best | at 95 % | slower | minutes |")
    print("|---|---|---|---|---|---|---|---|")
    every: list[Rehearsed] = []
    for number, case in enumerate(rehearsed_cases()):
        if given.cases and number not in given.cases:
            continue
        answers = SimulatedAnswers(case.case)
        found = []
        for seed in range(given.seeds):
            key = (case.case.name, seed, given.minutes)
            if key not in known:
                known[key] = play(case, answers, seed, minutes=given.minutes)
                if kept is not None:
                    kept.write({"seed": seed, "budget": given.minutes, "found": known[key]})
            found.append(known[key])
        print(row(case.case.name, found), flush=True)
        every += found
    said = summarize(every)
    print(
        f"| all, {len(every)} searches | | | | {cells(said)}",
        "" if said.as_asked(given.minutes) else "NOT AS ASKED",
    )
    print(json.dumps({"benchmark": "lab_tune", "all": asdict(said),
                      "runs": [asdict(one) for one in every]}))  # fmt: skip


if __name__ == "__main__":
    main()
