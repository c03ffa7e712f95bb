"""A step of a model on all cores of this machine: one process, or several that share its layers.

    python benchmarks/tensor_parallel.py [--model demo] [--ranks 2]

Bare forwards of 1, 6 and 64 tokens after some context, logits and exchanges included. `one` is one
process with a thread for each core, all layers in one call into C; `parts` the same, each kernel
called from Python, as processes that share layers do; `shared` are processes that have a part of
the threads each. Each repeat is a process of its own, in rotated order.
"""

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import replace
from typing import Any

from common import announce, finish, interleave, make_parser, ratio_of_medians

ARMS = ("one", "parts", "shared")
ROWS = (1, 6, 64)


def in_process(arm: str, settings: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of one process of this arm."""
    command = [sys.executable, __file__, "--arm", arm, "--model", settings.model]
    command += ["--ranks", str(settings.ranks), "--times", str(settings.times)]
    command += ["--context", str(settings.context)]
    command += ["--threads", str(settings.threads)] if settings.threads else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(settings: argparse.Namespace) -> dict[str, float]:
    """What a process of an arm does."""
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    from forwards import target_probe

    from foretoken import LLM

    ranks = settings.ranks if settings.arm == "shared" else 1
    with LLM(settings.model, tensor_parallel_size=ranks) as llm:
        probe = target_probe(llm, settings.context)
        if settings.arm == "parts":
            model: Any = probe.runner.model
            probe.runner.model = replace(model, compiled=None)
        found = {}
        with llm._engine.parts.threads:
            for rows in ROWS:
                probe.seconds(rows, 5)
                times = [probe.seconds(rows, 1) for _ in range(settings.times)]
                found[f"{rows} rows"] = statistics.median(times) * 1e3
        return found


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=100, help="steps per process")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.times = 1, 5
    if settings.arm:
        print(json.dumps(work(settings)))
        return
    where = announce(settings)
    arms = {arm: (lambda arm=arm: in_process(arm, settings)) for arm in ARMS}
    runs = interleave(arms, settings.repeats)
    results: dict[str, Any] = {}
    for arm, found in runs.items():
        for name in found[0]:
            value = statistics.median(one[name] for one in found)
            results[f"{arm}, {name}, ms"] = value
            print(f"{arm}, {name}: {value:.3f} ms")
    for arm in ARMS[:2]:
        for rows in ROWS:
            name = f"{rows} rows"
            above, below = ([one[name] for one in runs[kind]] for kind in (arm, "shared"))
            ratio = ratio_of_medians(above, below)
            results[f"{arm} / shared, {name}"] = ratio
            print(f"{arm} / shared, {name}: {ratio}")
    finish("tensor_parallel", where, settings, results, [])


if __name__ == "__main__":
    main()
