"""Every drafting method on the packaged pair against plain decoding: speed, acceptance, identity.

    python benchmarks/methods.py [--prompts 12] [--model demo --draft demo-draft]

Batch 1; prompts of about 128 tokens from held-out modules and 128 new tokens (and, for edits, a
held-out piece of code with a named change). The baseline is our own fastest plain decoding:
batch_invariant=False, no speculation. All arms stay loaded and take turns prompt by prompt.
Each of the three ways of sampling is measured: greedy, temperature 0.8 with a seed, and without.
Greedy and seeded output must be identical with speculation on and off (batch_invariant=True).
Prompts whose plain output repeats more than 30 % of its 8-grams flatter every method: they are
reported apart. A speed-up is of seconds per token, prompts read: a median over prompts.
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from common import Goal, announce, at_least, at_most, finish, make_parser, use_threads

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import installed
from foretoken.cli.timed_runs import (
    Arm,
    ComparedArm,
    Workload,
    interleave,
    repeated_ngrams,
    show_ratio,
    summarize,
    warm_up,
)
from tools.python_text.heldout import edit_prompts, heldout_prompts

PLAIN, INVARIANT = "plain", "plain, invariant"
LOOPING = 0.30
"""Share of repeated 8-grams from which on a text is too easy to draft."""
HEADS = {
    "eagle3": (3, 5, 7), "parallel": (3, 5), "mlp": (2, 3), "medusa": (2, 4), "dflash": (4, 5, 7),
    "dspark": (4, 5, 7),
}  # fmt: skip
"""Methods whose heads ship for `demo`, and draft lengths."""
LENGTHS = {"draft_model k=5": 2.6, "eagle3 k=5": 3.0, "mlp k=3": 1.9, "medusa k=4": 1.9,
           "parallel k=5": 2.5}  # fmt: skip
"""Acceptance lengths that are wanted."""
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "seed": 1000},
    "unseeded": {"temperature": 0.8},
}
Results = dict[str, dict[str, ComparedArm]]
"""By workload and arm; `identical` tells of plain decoding with invariance on."""


def configs(settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """speculative_config of every arm that drafts."""
    found: dict[str, dict[str, Any]] = {}
    for k in settings.draft_k:
        config = {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": k}
        found[f"draft_model k={k}"] = config
        for scheme in settings.draft_quantization:
            found[f"draft_model {scheme} k={k}"] = config | {"quantization": scheme}
    for k in settings.ngram_k:
        found[f"ngram k={k}"] = {"method": "ngram", "num_speculative_tokens": k}
    for method in settings.heads:
        if f"demo-{method}" in installed():
            for k in HEADS[method]:
                config = {"model": f"demo-{method}", "num_speculative_tokens": k}
                found[f"{method} k={k}"] = config
        else:
            print(f"{method}: left out, demo-{method} is not installed")
    return found


def measure(arms: Sequence[Arm], workload: Workload, repeats: int) -> Results:
    """All arms on all prompts in turns; prompts whose plain output loops are a workload apart."""
    warm_up(arms, workload)
    runs = [run for repeat in range(repeats) for run in interleave(arms, workload, repeat)]
    first = [run for run in runs if (run.arm, run.repeat) == (PLAIN, 0)]
    loops = {r.prompt_index for r in first if repeated_ngrams(r.output.token_ids, 8) > LOOPING}
    runs = [
        replace(run, workload=f"{run.workload}, looping") if run.prompt_index in loops else run
        for run in runs
    ]
    found: Results = {}
    same = {(one.workload, one.arm): one.identical for one in summarize(runs, INVARIANT)}
    for one in summarize(runs, PLAIN):
        identical = same[one.workload, one.arm]
        found.setdefault(one.workload, {})[one.arm] = replace(one, identical=identical)
    return found


def show(name: str, arms: dict[str, ComparedArm]) -> None:
    plain = arms[PLAIN]
    print(f"\n{name}: {plain.num_prompts} prompts; plain output repeats "
          f"{plain.repeated_4grams:.0%} of its 4-grams")  # fmt: skip
    print(f"{'':22}{'tokens/s':>9}  {'speed-up':22}{'length':>7} {'same':>5}  by position")
    for arm in arms.values():
        same = "" if "unseeded" in name else "yes" if arm.identical else "NO"
        positions = " ".join(f"{share:.2f}" for share in arm.acceptance_by_position)
        print(f"{arm.arm:22}{arm.tokens_per_s:9.1f}  {show_ratio(arm.speedup):22}"
              f"{arm.acceptance_length:7.2f} {same:>5}  {positions}", flush=True)  # fmt: skip


def goals(results: Results) -> list[Goal]:
    """What the project wants of its packaged pair; workloads without prompts have no goal."""
    wrong = sum(
        not arm.identical
        for name, arms in results.items()
        for arm in arms.values()
        if "unseeded" not in name and arm.arm != PLAIN
    )
    found = [at_most("arms whose greedy or seeded outputs differ with speculation", wrong, 0)]

    def best(name: str, *methods: str) -> float:
        arms = results[name].values()
        return max((a.speedup.median for a in arms if a.arm.split(" ")[0] in methods), default=0.0)

    for name, arms in results.items():
        if name == "held-out, greedy":
            for arm, wanted in LENGTHS.items():
                if arm in arms:
                    length = arms[arm].acceptance_length
                    found.append(at_least(f"acceptance length, {arm}, {name}", length, wanted))
            found.append(at_least(f"best head's speed-up, {name}", best(name, *HEADS), 2.0))
        if name.startswith("held-out") and not name.endswith("looping"):
            speed = best(name, "draft_model")
            found.append(at_least(f"draft_model speed-up at its best k, {name}", speed, 1.6))
        if name == "edits, greedy":
            found.append(at_least(f"ngram speed-up, {name}", best(name, "ngram"), 1.6))
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="new ones; default: %(default)s")
    parser.add_argument("--edits", type=int, default=8, help="edit prompts; default: %(default)s")
    parser.add_argument("--draft-k", type=int, nargs="+", default=[2, 3, 5, 7])
    parser.add_argument("--draft-quantization", nargs="+", default=["int8"],
                        choices=["int8", "int4"], help="of further arms' drafts")  # fmt: skip
    parser.add_argument("--ngram-k", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=HEADS)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.prompts, settings.edits, settings.tokens = 2, 2, 1, 24
        settings.draft_k, settings.ngram_k = [2, 5], [5]
    use_threads(settings.threads)
    where = announce(settings)
    texts = {"held-out": tuple(p.text for p in heldout_prompts(settings.prompts, tokens=128)),
             "edits": tuple(p.text for p in edit_prompts(settings.edits))}  # fmt: skip
    results: Results = {}
    with ExitStack() as stack:

        def load(name: str, invariant: bool, config: dict[str, Any] | None = None) -> Arm:
            # Prefixes would be found again in the next turn, and a length is measured as it is.
            llm = LLM(settings.model, max_num_seqs=1, enable_prefix_caching=False,
                      batch_invariant=invariant, adaptive_speculation=False,
                      speculative_config=config)  # fmt: skip
            return Arm(name, stack.enter_context(llm))

        arms = [load(PLAIN, False), load(INVARIANT, True)]
        arms += [load(name, True, config) for name, config in configs(settings).items()]
        for name, prompts in texts.items():
            for kind in settings.samplings if prompts else ():
                params = SamplingParams(
                    **SAMPLINGS[kind], max_tokens=settings.tokens, ignore_eos=True
                )
                workload = Workload(name=f"{name}, {kind}", prompts=prompts, params=params)
                found = measure(arms, workload, settings.repeats)
                for title, by_arm in found.items():
                    show(title, by_arm)
                results |= found
    finish("methods", where, settings, results, goals(results))


if __name__ == "__main__":
    main()
