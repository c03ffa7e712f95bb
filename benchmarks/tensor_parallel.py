"""A step of a model on all cores of this machine: one process, or several that share its layers.

    python benchmarks/tensor_parallel.py [--model demo] [--ranks 2] [--draft demo-draft]

Bare forwards of 1, 6 and 64 tokens after some context, logits and exchanges included. `one` is one
process with a thread for each core, all layers in one call into C; `parts` the same, each kernel
called from Python, as processes that share layers do; `shared` are processes that have a part of
the threads each. Of these it is said how much of a step rank 0 spends in messages and gathers,
waiting for the others included, and what the same exchanges take with nothing computed between.
With --draft chains of four greedy drafts by a draft model beside such processes:
on rank 0, with its part of the threads (`alone`), or on all ranks (`together`). Each repeat is a
process of its own, in rotated order.
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
DRAFT_ARMS = ("alone", "together")
ROWS = (1, 6, 64)
DRAFTS = 4


def in_process(arm: str, settings: argparse.Namespace) -> dict[str, float]:
    """Median milliseconds of one process of this arm."""
    command = [sys.executable, __file__, "--arm", arm, "--model", settings.model]
    command += ["--ranks", str(settings.ranks), "--times", str(settings.times)]
    command += ["--context", str(settings.context)]
    command += ["--threads", str(settings.threads)] if settings.threads else []
    command += ["--draft", settings.draft] if settings.draft else []
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(settings: argparse.Namespace) -> dict[str, float]:
    """What a process of an arm does."""
    import torch

    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.draft:
        return drafting(settings)
    from forwards import target_probe

    from foretoken import LLM

    ranks = settings.ranks if settings.arm == "shared" else 1
    with LLM(settings.model, tensor_parallel_size=ranks) as llm:
        probe = target_probe(llm, settings.context)
        if settings.arm == "parts":
            model: Any = probe.runner.model
            probe.runner.model = replace(model, compiled=None)
        found: dict[str, float] = {}
        with llm._engine.parts.threads:
            for rows in ROWS:
                probe.seconds(rows, 5)
                if ranks > 1:
                    found |= shared_step(llm, probe, rows, settings.times)
                    continue
                times = [probe.seconds(rows, 1) for _ in range(settings.times)]
                found[f"{rows} rows"] = statistics.median(times) * 1e3
        return found


def shared_step(llm: Any, probe: Any, rows: int, times: int) -> dict[str, float]:
    """Milliseconds of a step of several processes, and of what rank 0 exchanges in it."""
    from gathering import GATHER, Exchanges, exchange_alone

    from foretoken.distributed.processes import Followers
    from foretoken.distributed.shared_memory import SharedMemoryRendezvous

    group = llm._engine.parts.followers.joined
    with Exchanges(group) as exchanges:
        steps, spent = [], []
        for _ in range(times):
            exchanges.begin()
            steps.append(probe.seconds(rows, 1))
            spent.append(exchanges.seconds)
    calls = exchanges.calls
    made = SharedMemoryRendezvous.make(group.size, group.wait_s)
    with Followers(made, exchange_alone, calls, times) as others:
        alone = exchange_alone(others.joined, calls, times)
    return {
        f"{rows} rows": statistics.median(steps) * 1e3,
        f"{rows} rows, exchanging": statistics.median(spent) * 1e3,
        f"{rows} rows, exchanging alone": alone,
        f"{rows} rows, gathers": float(sum(kind == GATHER for kind, _ in calls)),
        f"{rows} rows, messages": float(sum(kind != GATHER for kind, _ in calls)),
        f"{rows} rows, KiB": sum(size for _, size in calls) / 1024,
    }


def drafting(settings: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a chain."""
    from forwards import draft_probe

    from foretoken import LLM

    config: dict[str, Any] = {
        "method": "draft_model",
        "model": settings.draft,
        "num_speculative_tokens": DRAFTS,
        "draft_tensor_parallel_size": settings.ranks if settings.arm == "together" else 1,
    }
    ranks = settings.ranks
    with LLM(settings.model, tensor_parallel_size=ranks, speculative_config=config) as llm:
        probe = draft_probe(llm, settings.context)
        with llm._engine.parts.threads:
            probe.chain_seconds(DRAFTS, 5)
            times = [probe.chain_seconds(DRAFTS, 1) for _ in range(settings.times)]
    return {f"{DRAFTS} drafts": statistics.median(times) * 1e3}


def report(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Print and return medians over processes, how the last arm fares, and its exchanges."""
    medians = {
        arm: {name: statistics.median(one[name] for one in found) for name in found[0]}
        for arm, found in runs.items()
    }
    results: dict[str, Any] = {}
    *others, last = runs
    for arm, found in medians.items():
        for name in found:
            results[f"{arm}, {name}"] = found[name]
            if "," not in name:
                print(f"{arm}, {name}: {found[name]:.3f} ms")
    for arm in others:
        for name in runs[arm][0]:
            above, below = ([one[name] for one in runs[kind]] for kind in (arm, last))
            ratio = ratio_of_medians(above, below)
            results[f"{arm} / {last}, {name}"] = ratio
            print(f"{arm} / {last}, {name}: {ratio}")
    for rows in (f"{count} rows" for count in ROWS):
        found = medians[last]
        if f"{rows}, exchanging" in found:
            step, spent, alone = (
                found[f"{rows}{what}"] for what in ("", ", exchanging", ", exchanging alone")
            )
            print(
                f"{last}, {rows}: messages {found[f'{rows}, messages']:.0f}, gathers "
                f"{found[f'{rows}, gathers']:.0f}, {found[f'{rows}, KiB']:.0f} KiB from "
                f"rank 0: {spent:.3f} ms or {spent / step:.1%} of the step, waiting included; "
                f"{alone:.3f} ms or {alone / step:.1%} with nobody late"
            )
    return results


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=100, help="steps per process")
    parser.add_argument("--draft", help="a draft model, which is timed instead")
    parser.add_argument("--arm", choices=ARMS + DRAFT_ARMS, help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.times = 1, 5
    if settings.arm:
        print(json.dumps(work(settings)))
        return
    where = announce(settings)
    names = DRAFT_ARMS if settings.draft else ARMS
    arms = {arm: (lambda arm=arm: in_process(arm, settings)) for arm in names}
    results = report(interleave(arms, settings.repeats))
    finish("tensor_parallel", where, settings, results, [])


if __name__ == "__main__":
    main()
