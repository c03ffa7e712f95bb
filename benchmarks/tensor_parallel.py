"""A step of a model on all cores of this machine: one process, or several that share its layers.

    python benchmarks/tensor_parallel.py [--model demo] [--ranks 2]

Bare forwards of 1, 6 and 64 tokens after some context, logits and exchanges included. `one` is one
process with a thread for each core, `shared` are processes that have a part of the threads each.
Each repeat is a process of its own, in rotated order.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

from common import announce, finish, interleave, make_parser, ratio_of_medians

from foretoken.models.tensors import SpanLayout

ARMS = ("one", "shared")
ROWS = (1, 6, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A runner whose first pages hold `context` random tokens, and that nothing else uses."""

    runner: Any
    context: int
    vocab: int

    def prefill(self) -> None:
        """Write the context's keys and values."""
        self._forward(0, self.context)

    def seconds(self, rows: int, times: int) -> float:
        """Mean time of a pass over `rows` tokens after the context, logits for each."""
        began = time.perf_counter()
        for _ in range(times):
            self._forward(self.context, rows)
        return (time.perf_counter() - began) / times

    def _forward(self, start: int, rows: int) -> Any:
        pages = list(range(-(-(start + rows) // self.runner.page_size)))
        layout = SpanLayout(start=start, num_tokens=rows, page_table=pages)
        ids = random.Random(rows).choices(range(2, self.vocab), k=rows)
        return self.runner.forward([layout], [ids], range(rows)).logits_RV


def target_probe(llm: Any, context: int) -> Probe:
    """Over the target of an idle LLM."""
    parts = llm._engine.parts
    probe = Probe(runner=parts.runner, context=context, vocab=parts.vocab_size)
    probe.prefill()
    return probe


def in_process(arm: str) -> dict[str, float]:
    """Median milliseconds of one process of this arm, which is this one with one option more."""
    command = [sys.executable, *sys.argv, "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def work(settings: argparse.Namespace) -> dict[str, float]:
    """What a process of an arm does."""
    from foretoken import LLM

    ranks = settings.ranks if settings.arm == "shared" else 1
    found: dict[str, float] = {}
    with LLM(settings.model, tensor_parallel_size=ranks) as llm:
        probe = target_probe(llm, settings.context)
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
    if settings.threads:
        import torch

        torch.set_num_threads(settings.threads)
    if settings.arm:
        print(json.dumps(work(settings)))
        return
    where = announce(settings)
    runs = interleave({arm: (lambda arm=arm: in_process(arm)) for arm in ARMS}, settings.repeats)
    results: dict[str, Any] = {}
    for name in runs["one"][0]:
        one, shared = ([run[name] for run in runs[arm]] for arm in ARMS)
        ratio = ratio_of_medians(one, shared)
        results[name] = {"one": one, "shared": shared, "one / shared": ratio}
        print(f"{name}: one {statistics.median(one):.3f} ms, shared "
              f"{statistics.median(shared):.3f} ms, one / shared {ratio}")  # fmt: skip
    finish("tensor_parallel", where, settings, results, [])


if __name__ == "__main__":
    main()
