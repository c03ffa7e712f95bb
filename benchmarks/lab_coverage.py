"""How often the lab's 95 % intervals hold the truth, over simulated experiments with known truth.

    python benchmarks/lab_coverage.py --experiments 1500

Every law of `foretoken.lab.stats.simulator`: 93 to 97 % are asked for, and at least 93 % of arms
given by URL. `--before` leaves out what the intervals know of starts that blocks do not show, and
leaves the slow start in. Nothing is timed: any machine gives the same numbers.
"""

import argparse
import json
from dataclasses import asdict

from foretoken.lab.decide.rehearsal import SimulatedExperiment, measure_coverage, without_start
from foretoken.lab.stats.simulator import LAWS

METRICS = ("tpot_p50", "tpot_mean", "tpot_p95", "ttft_p95")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1500)
    parser.add_argument("--requests", type=int, default=120, help="per block")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--before", action="store_true")
    given = parser.parse_args()
    results = []
    for name in given.laws:
        experiment = SimulatedExperiment(law=LAWS[name], requests_per_block=given.requests)
        cells = []
        for metric in METRICS:
            found = measure_coverage(
                experiment,
                metric,
                given.experiments,
                cut=(lambda drawn: drawn) if given.before else without_start,
                unseen_sd=0.0 if given.before else None,
            )
            cells.append(f"{found.share:.1%} (bias {found.bias:+.1%})")
            results.append({"law": name, **asdict(found)})
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "lab_coverage", "before": given.before, "results": results}))


if __name__ == "__main__":
    main()
