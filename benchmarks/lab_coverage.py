"""How often the lab's 95 % intervals hold the truth, over simulated experiments with known truth.

    python benchmarks/lab_coverage.py --experiments 1500

Every law of `benchmarks.simulate.ab_draws`: 93 to 97 % are asked for, and at least 93 % of arms
given by URL. With `--acceptance` instead quantiles over requests of their acceptance, for few and
many requests, short and long, different and alike. Nothing is timed: any machine gives the same
numbers.
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import common  # noqa: F401  (it makes the packages beside it known)
import numpy as np

from benchmarks.simulate.ab_draws import LAWS, DraftLaw, draw_accepted, true_quantile
from benchmarks.simulate.decide_rehearsal import SimulatedExperiment, measure_coverage
from foretoken.lab.stats.shrinkage import request_quantiles

METRICS = ("tpot_p50", "tpot_mean", "tpot_p95", "ttft_p95")
QUANTILES = (0.1, 0.5, 0.9)
REQUESTS, STEPS = (20, 40, 120), 24
DRAFT_LAWS = {
    "requests that differ": DraftLaw(alpha=0.7, concentration=20.0),
    "and differ much": DraftLaw(alpha=0.7, concentration=6.0),
    "nearly alike": DraftLaw(alpha=0.8, concentration=100.0),
    "alike": DraftLaw(alpha=0.8, concentration=math.inf),
}


def of_acceptance(experiments: int) -> Iterator[dict[str, Any]]:
    """Rows of P10, P50 and P90 over requests whose answers take `STEPS` verifications or half."""
    for name, law in DRAFT_LAWS.items():
        truths = [true_quantile(law, q) for q in QUANTILES]
        for count in REQUESTS:
            for steps in (STEPS, STEPS // 2):
                held = np.zeros(len(QUANTILES))
                for seed in range(experiments):
                    rng = np.random.default_rng(seed)
                    accepted_NS = draw_accepted(law, count, steps, rng)
                    found = request_quantiles(
                        accepted_NS.mean(axis=1), np.full(count, float(steps)),
                        accepted_NS.var(axis=1, ddof=1), QUANTILES,
                    )  # fmt: skip
                    held += [own.low <= truth <= own.high
                             for own, truth in zip(found, truths, strict=True)]  # fmt: skip
                shares = (held / experiments).tolist()
                cells = " | ".join(f"{share:.1%}" for share in shares)
                print(f"| {name} | {count} | {steps} | {cells} |", flush=True)
                yield {"law": name, "requests": count, "steps": steps, "shares": shares}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experiments", type=int, default=1500)
    parser.add_argument("--requests", type=int, default=120, help="per block")
    parser.add_argument("--laws", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument("--acceptance", action="store_true")
    given = parser.parse_args()
    if given.acceptance:
        found = list(of_acceptance(given.experiments))
        print(json.dumps({"benchmark": "lab_coverage", "acceptance": found}))
        return
    results = []
    for name in given.laws:
        experiment = SimulatedExperiment(law=LAWS[name], requests_per_block=given.requests)
        cells = []
        for metric in METRICS:
            found = measure_coverage(experiment, metric, given.experiments)
            cells.append(f"{found.share:.1%} (bias {found.bias:+.1%})")
            results.append({"law": name, **asdict(found)})
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    print(json.dumps({"benchmark": "lab_coverage", "results": results}))


if __name__ == "__main__":
    main()
