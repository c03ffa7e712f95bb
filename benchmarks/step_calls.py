"""A step of the packaged target: PyTorch's operations, our kernels part by part, one call.

    python benchmarks/step_calls.py [--model demo] [--threads 1]

Bare forwards of one token and of six (a verification with k=5) after some context, logits
included, invariant in every arm. `off` runs with FORETOKEN_KERNELS=off, `parts` calls each kernel
from Python, `one call` runs all layers in one call into C. Each repeat is a process of its own,
in rotated order. Python is what is left of `one call` after the call itself and the head.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

from common import announce, at_least, finish, interleave, make_parser, ratio_of_medians

ARMS = ("off", "parts", "one call")
ROWS = (1, 6)


def in_process(arm: str, settings: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of one process of this arm."""
    command = [sys.executable, __file__, "--arm", arm, "--model", settings.model]
    command += ["--context", str(settings.context), "--times", str(settings.times)]
    command += ["--threads", str(settings.threads)] if settings.threads else []
    environment = {**os.environ, "FORETOKEN_KERNELS": "off" if arm == "off" else "auto"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(settings: argparse.Namespace) -> dict[str, float]:
    """What a process of an arm does."""
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    from forwards import target_probe

    from foretoken import LLM

    probe = target_probe(LLM(settings.model), settings.context)
    model: Any = probe.runner.model
    if settings.arm == "parts":
        probe.runner.model = replace(model, compiled=None)
    found = {}
    for rows in ROWS:
        probe.seconds(rows, 5)
        times = [probe.seconds(rows, 1) for _ in range(settings.times)]
        found[f"{rows} rows"] = statistics.median(times) * 1e3
    if settings.arm == "one call":
        found["layers, 1 rows"] = call_ms(probe, model, settings.times)
        hidden_1D = torch.randn(1, model.shape.hidden_size).to(model.embedding.dtype)
        found["head, 1 rows"] = median_ms(lambda: model.logits(hidden_1D), settings.times)
    return found


def call_ms(probe: Any, model: Any, times: int) -> float:
    """Median milliseconds inside the call into C of a step of one token."""
    spent: list[float] = []
    run = model.compiled._run

    def timed(*arguments: Any) -> None:
        began = time.perf_counter()
        run(*arguments)
        spent.append(time.perf_counter() - began)

    model.compiled._run = timed
    probe.seconds(1, times)
    model.compiled._run = run
    return statistics.median(spent) * 1e3


def median_ms(call: Any, times: int) -> float:
    """Median milliseconds of a call."""
    spent = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return statistics.median(spent) * 1e3


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=200, help="steps per process")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.times = 2, 5
    if settings.arm:
        print(json.dumps(work(settings)))
        return
    random.seed(0)
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
            slow = [one[f"{rows} rows"] for one in runs[arm]]
            fast = [one[f"{rows} rows"] for one in runs["one call"]]
            ratio = ratio_of_medians(slow, fast)
            results[f"{arm} / one call, {rows} rows"] = ratio
            print(f"{arm} / one call, {rows} rows: {ratio}")
    goal = results["off / one call, 1 rows"].value
    goals = [at_least("packaged model, 1 row: PyTorch's operations / one call", goal, 2.5)]
    finish("step_calls", where, settings, results, goals)


if __name__ == "__main__":
    main()
