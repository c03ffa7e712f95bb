"""What trees of drafts cost and gain on the packaged pair, greedy, batch 1.

    python benchmarks/trees.py

Passes: one forward of the target over a tree, every branch in the arithmetic of its chain, against
one over a chain of as many tokens, which is the least that any tree attention over the same rows
could cost; with the compiled attention and with the chains of PyTorch's. End to end: plain
decoding, the best chain, and trees of the same and of larger depth.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from unittest import mock

from common import announce, finish, interleave, make_parser, ratio_of_medians, use_threads
from forwards import Probe, target_probe
from runs import acceptance, build, greedy, run_once

from foretoken.backend import CpuKernels, PlainTorch
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.tree_shapes import StaticTree
from foretoken.runtime.draft_tree import tree_of
from tools.python_text.heldout import heldout_prompts

TREES = {
    "10 nodes, depth 4": [
        [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 1], [0, 1], [0, 1, 0], [1], [1, 0], [2],
    ],
    "16 nodes, depth 5": [
        [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1], [0, 0, 1],
        [0, 0, 1, 0], [0, 1], [0, 1, 0], [0, 2], [1], [1, 0], [1, 0, 0], [2], [3],
    ],
}  # fmt: skip


def pass_timer(
    probe: Probe, choices: list[list[int]], wide: bool, times: int
) -> Callable[[], float]:
    """Seconds of a pass over the newest token and a tree, or over a chain of as many tokens."""
    tree = tree_of(StaticTree.of(choices).parents)
    rows = len(choices) + 1
    pages = list(range(-(-(probe.context + rows) // probe.runner.page_size)))
    layout = SpanLayout(
        start=probe.context,
        num_tokens=rows,
        page_table=pages,
        paths=tree.window_paths(1) if wide else None,
    )
    ids = random.Random(rows).choices(range(2, probe.vocab), k=rows)

    def measure() -> float:
        began = time.perf_counter()
        for _ in range(times):
            probe.runner.forward([layout], [ids], range(rows))
        return (time.perf_counter() - began) / times

    return measure


def passes(settings: argparse.Namespace) -> dict[str, object]:
    """Tree over chain, by attention, context and shape."""
    found: dict[str, object] = {}
    without = mock.patch.object(CpuKernels, "attention", PlainTorch.attention)
    for attention in ("compiled", "chains"):
        if attention == "chains":
            without.start()
        llm = build("demo", max_model_len=2048, max_num_seqs=1)
        for context in settings.contexts:
            probe = target_probe(llm, context)
            for name, choices in TREES.items():
                arms = {
                    kind: pass_timer(probe, choices, kind == "tree", settings.times)
                    for kind in ("chain", "tree")
                }
                taken = interleave(arms, settings.repeats)
                ratio = ratio_of_medians(taken["tree"], taken["chain"])
                milliseconds = statistics.median(taken["chain"]) * 1e3
                key = f"{attention}, context {context}, {name}"
                found[key] = {"tree over chain": ratio, "chain ms": milliseconds}
                print(f"{key}: {ratio}, chain {milliseconds:.2f} ms", flush=True)
    without.stop()
    return found


def ends(settings: argparse.Namespace) -> dict[str, object]:
    """Acceptance length and speed-up against plain decoding, invariance on."""
    draft = {"method": "draft_model", "model": "demo-draft"}
    arms = {
        "plain": None,
        "chain k=3": {**draft, "num_speculative_tokens": 3},
        "chain k=5": {**draft, "num_speculative_tokens": 5},
        **{name: {**draft, "choices": choices} for name, choices in TREES.items()},
    }
    llms = {name: build("demo", config) for name, config in arms.items()}
    encode = llms["plain"].get_tokenizer().encode
    prompts = [encode(p.text) for p in heldout_prompts(settings.prompts, tokens=96)]
    params = greedy(settings.tokens)
    runs = {name: [run_once(llm, p, params) for p in prompts] for name, llm in llms.items()}

    def timer(name: str) -> Callable[[], float]:
        def measure() -> float:
            found = [run_once(llms[name], p, params) for p in prompts]
            return sum(run.decode_s for run in found)

        return measure

    taken = interleave({name: timer(name) for name in arms}, settings.repeats)
    found: dict[str, object] = {}
    for name in arms:
        same = [a.token_ids == b.token_ids for a, b in zip(runs[name], runs["plain"], strict=True)]
        kept = acceptance(runs[name])
        ratio = ratio_of_medians(taken["plain"], taken[name])
        found[name] = {"acceptance": kept, "speed-up": ratio, "same": f"{sum(same)} of {len(same)}"}
        print(f"{name}: {kept}, speed-up {ratio}, same {sum(same)} of {len(same)}", flush=True)
    return found


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--times", type=int, default=20, help="passes per repeat")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.contexts, settings.times = 2, [64], 2
        settings.prompts, settings.tokens = 1, 16
    use_threads(settings.threads)
    where = announce(settings)
    results = {"passes": passes(settings), "end_to_end": ends(settings)}
    finish("trees", where, settings, results, [])


if __name__ == "__main__":
    main()
