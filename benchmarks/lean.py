"""Plain decoding of a packaged model against a lean loop of PyTorch's operations of the same shape.

    python benchmarks/lean.py [--model demo] [--threads 1] [--context 128] [--tokens 128]

The lean loop has no engine: one sequence, a buffer of keys and values, the fewest operations that
PyTorch can do a layer in, and rows that keep their bits as ours do (`lean_llama`). It decodes
greedily from the same weights. Ours is `LLM.generate` as a user calls it, sampling, scheduling and
Python included, and, apart, the bare pass of one row. Both take turns in one process. Wanted:
ours >= 2.5 times as fast, end to end.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import announce, at_least, finish, interleave, make_parser, ratio_of_medians
from common import use_threads as set_threads
from forwards import target_probe
from lean_llama import LeanLlama
from runs import build, greedy, run_once

from foretoken import LLM
from tools.python_text.heldout import heldout_prompts

WANTED = 2.5


def engine_step(llm: LLM, prompt_ids: list[int], tokens: int) -> Callable[[], float]:
    """Seconds per token after the first, engine included."""

    def measure() -> float:
        return run_once(llm, prompt_ids, greedy(tokens)).decode_s / (tokens - 1)

    return measure


def lean_text(model: LeanLlama, prompt_ids: list[int], tokens: int) -> tuple[list[int], float]:
    """What the lean loop writes, and seconds per token after the first."""
    with torch.inference_mode():
        token = int(model.forward(torch.tensor(prompt_ids), 0).argmax())
        written, began = [token], time.perf_counter()
        for position in range(len(prompt_ids), len(prompt_ids) + tokens - 1):
            token = int(model.forward(torch.tensor([token]), position).argmax())
            written.append(token)
        return written, (time.perf_counter() - began) / (tokens - 1)


def equal_start(a: list[int], b: list[int]) -> int:
    """How many tokens two texts share before they part."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(a), len(b)))


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--context", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.set_defaults(repeats=9)
    settings: argparse.Namespace = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.tokens = 2, 8
    set_threads(settings.threads)
    llm = build(settings.model, batch_invariant=True)
    lean = LeanLlama.load(settings.model, settings.context + settings.tokens)
    where = announce(settings)
    [prompt] = heldout_prompts(1, tokens=settings.context)
    ids = llm.get_tokenizer().encode(prompt.text)[: settings.context]
    ours = list(run_once(llm, ids, greedy(settings.tokens)).token_ids)
    theirs, _ = lean_text(lean, ids, settings.tokens)
    probe = target_probe(llm, settings.context)
    seconds = interleave(
        {
            "engine": engine_step(llm, ids, settings.tokens),
            "pass": probe.timer(1, settings.tokens),
            "lean": lambda: lean_text(lean, ids, settings.tokens)[1],
        },
        settings.repeats,
    )
    ratios = {arm: ratio_of_medians(seconds["lean"], seconds[arm]) for arm in ("engine", "pass")}
    results: dict[str, Any] = {
        "ms per token": {arm: statistics.median(s) * 1e3 for arm, s in seconds.items()},
        "lean / ours": ratios,
        "first tokens the same": equal_start(ours, theirs),
    }
    print({arm: round(value, 3) for arm, value in results["ms per token"].items()})
    for arm, ratio in ratios.items():
        print(f"lean / {arm}: {ratio}")
    print(f"the same tokens from the start: {results['first tokens the same']}")
    goals = [at_least("packaged, plain: engine against lean", ratios["engine"].value, WANTED)]
    finish("lean", where, settings, results, goals)


if __name__ == "__main__":
    main()
