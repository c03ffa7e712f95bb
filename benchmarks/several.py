"""Several drafters against the better of their parts where rows are free: a billion parameters.

    python benchmarks/several.py --models FOLDER

FOLDER is what make_models.py wrote. Prompts of two kinds take turns: `fresh` text, which look-ups
know nothing of and a draft model agrees with at four of five places, and `echo`, where the prompt
holds what follows. On each alone one drafter is enough; mixed traffic needs both. Batch 1, greedy;
answers stay shorter than a cycle of the models, so that fresh text stays fresh. All arms stay
loaded (a target each) and take turns prompt by prompt. Every text is compared with the one that
the models must write. `methods.py` asks the same of the packaged pair, whose rows cost time.
"""

import argparse
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common import (
    Goal,
    announce,
    at_least,
    finish,
    in_turn,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from prompts import load_prompts
from runs import Run, acceptance, build, greedy, run_once

from foretoken import LLM

KINDS = ("fresh", "echo")
PLAIN, DRAFT, SUFFIX = "plain", "draft_model", "suffix"
TOGETHER = ("first", "best")
CONTEXT = 512
GAIN = 1.05

Table = dict[str, list[list[Run]]]
"""Per arm, per repeat, one run per prompt."""


def arms(given: argparse.Namespace) -> dict[str, dict[str, Any] | None]:
    """Speculative config by name; plain decoding has none."""
    model = {
        "method": "draft_model",
        "model": str(given.models / "cycle-draft-80"),
        "num_speculative_tokens": given.draft_k,
    }
    suffix = {"method": "suffix", "num_speculative_tokens": given.suffix_k}
    both = {name: {"drafters": [suffix, model], "policy": name} for name in TOGETHER}
    return {PLAIN: None, DRAFT: model, SUFFIX: suffix, **both}


def measure(llms: Mapping[str, LLM], prompts: list[list[int]], given: argparse.Namespace) -> Table:
    """Every arm on every prompt, `repeats` times, the order of arms rotating."""
    table: Table = {name: [[] for _ in range(given.repeats)] for name in llms}
    for llm in llms.values():
        run_once(llm, prompts[0], greedy(given.tokens), "warm-up")
    for repeat in range(given.repeats):
        for index, ids in enumerate(prompts):
            for name in in_turn(list(llms), repeat * len(prompts) + index):
                run = run_once(llms[name], ids, greedy(given.tokens), f"{repeat}")
                table[name][repeat].append(run)
    return table


def summarize(table: Table, members: list[int]) -> dict[str, dict[str, Any]]:
    """Speed-up and acceptance of every arm over some of the prompts."""
    seconds = {
        name: [sum(runs[i].decode_s for i in members) for runs in repeats]
        for name, repeats in table.items()
    }
    return {
        name: {
            "seconds": statistics.median(seconds[name]),
            "speedup": ratio_of_medians(seconds[PLAIN], seconds[name]),
            "length": acceptance(runs[i] for runs in repeats for i in members).length,
        }
        for name, repeats in table.items()
    }


def main() -> None:
    """Load every arm, measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", type=Path, required=True, help="what make_models.py wrote")
    parser.add_argument("--prompts", type=int, default=4, help="of each kind; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=48, help="new ones; default: %(default)s")
    parser.add_argument("--draft-k", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--suffix-k", type=int, default=16, help="default: %(default)s")
    given = parser.parse_args()
    if given.quick:
        given.prompts, given.tokens, given.repeats = 1, 16, 2
    use_threads(given.threads)
    where = announce(given)
    target = str(given.models / "cycle-target")
    llms = {
        name: build(target, config, max_model_len=CONTEXT) for name, config in arms(given).items()
    }
    found = [load_prompts(given.models, kind) for kind in KINDS]
    pairs = [(k, n) for n in range(given.prompts) for k in range(len(KINDS))]
    table = measure(llms, [found[k].ids[n] for k, n in pairs], given)
    groups = {kind: [i for i, (k, _) in enumerate(pairs) if k == at] for at, kind in
              enumerate(KINDS)}  # fmt: skip
    results: dict[str, Any] = {}
    for title, members in {**groups, "all": list(range(len(pairs)))}.items():
        results[title] = summarize(table, members)
        print(f"\n{title}: {len(members)} prompts")
        for name, arm in results[title].items():
            print(f"{name:14}{arm['speedup']!s:24}{arm['length']:6.2f}")
    wrong = sum(
        list(run.token_ids) != found[k].answers[n][: given.tokens]
        for repeats in table.values() for runs in repeats
        for run, (k, n) in zip(runs, pairs, strict=True)
    )  # fmt: skip
    totals = {
        name: [sum(run.decode_s for run in runs) for runs in repeats]
        for name, repeats in table.items()
    }
    better = min((DRAFT, SUFFIX), key=lambda name: statistics.median(totals[name]))
    gains = {name: ratio_of_medians(totals[better], totals[name]) for name in TOGETHER}
    for name, gain in gains.items():
        print(f"{name} over {better}: {gain}")
    results["over the better part"] = {"better": better, **gains}
    goals = [
        Goal(name="wrong answers", wanted="0", measured=wrong, met=wrong == 0),
        at_least("best over the better of suffix and draft_model", gains["best"].value, GAIN),
    ]
    finish("several", where, given, results, goals)


if __name__ == "__main__":
    main()
