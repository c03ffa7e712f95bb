"""Every drafting method on the packaged pair against plain decoding: speed, acceptance, identity.

    python benchmarks/methods.py [--prompts 12] [--model demo --draft demo-draft]

Batch 1; prompts of about 128 tokens from held-out modules and 128 new tokens (and, for edits, a
held-out piece of code with a named change). The baseline is our own fastest plain decoding:
batch_invariant=False, no speculation. All arms stay loaded and take turns prompt by prompt.
Each of the three ways of sampling is measured: greedy, temperature 0.8 with a seed, and without.
Greedy and seeded output must be identical with speculation on and off (batch_invariant=True).
Prompts whose plain output repeats more than 30 % of its 8-grams flatter every method: they are
reported apart. Speed-ups are sums over prompts, median over repeats.
"""

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from common import (
    Goal,
    Ratio,
    announce,
    at_least,
    copied_share,
    finish,
    in_turn,
    make_pair_parser,
    ratio_of_medians,
    repeated_share,
    use_threads,
)
from runs import Acceptance, Run, acceptance, build, run_once

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import installed
from tools.python_text.heldout import edit_prompts, heldout_prompts

PLAIN, INVARIANT = "plain", "plain, invariant"
LOOPING = 0.30
TEMPERATURE = 0.8
HEADS = {
    "eagle3": (3, 5, 7), "parallel": (3, 5), "mlp": (2, 3), "medusa": (2, 4), "dflash": (4, 5, 7),
    "dspark": (4, 5, 7),
}  # fmt: skip
"""Methods whose heads ship for `demo`, and draft lengths."""
LENGTHS = {"draft_model k=5": 2.6, "eagle3 k=5": 3.0, "mlp k=3": 1.9, "medusa k=4": 1.9,
           "parallel k=5": 2.5}  # fmt: skip
"""Acceptance lengths that are wanted."""
SAMPLINGS = ("greedy", "seeded", "unseeded")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One arm over one group of prompts."""

    speedup: Ratio
    """Plain's time / this arm's, from first token to last."""
    speedup_end_to_end: Ratio
    """The same with prefill."""
    tokens_per_s: float
    drafting_share: float
    """Of the time with prefill, in the drafter."""
    acceptance: Acceptance
    num_same: int
    """Prompts whose tokens equal those of plain decoding with invariance on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """Prompts that are alike, under one way of sampling."""

    num_prompts: int
    repeated_4grams: float
    repeated_8grams: float
    copied_8grams: float
    """Share of the output's 8-grams that stand in the prompt."""
    arms: dict[str, ArmResult]


Table = dict[str, list[list[Run]]]
"""Per arm, per repeat, one run per prompt."""


def sampling(kind: str, index: int, tokens: int) -> SamplingParams:
    """The parameters of prompt `index`."""
    temperature = 0.0 if kind == "greedy" else TEMPERATURE
    seed = 1000 + index if kind == "seeded" else None
    return SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)


def measure(
    llms: Mapping[str, LLM], prompts: Sequence[list[int]], kind: str, settings: argparse.Namespace
) -> Table:
    """Every arm on every prompt, `repeats` times, the order of arms rotating."""
    table: Table = {name: [[] for _ in range(settings.repeats)] for name in llms}
    for llm in llms.values():
        run_once(llm, prompts[0], sampling("greedy", 0, settings.tokens), "warm-up")
    for repeat in range(settings.repeats):
        for index, ids in enumerate(prompts):
            params = sampling(kind, index, settings.tokens)
            for name in in_turn(list(llms), repeat * len(prompts) + index):
                salt = f"{kind} {repeat}"
                table[name][repeat].append(run_once(llms[name], ids, params, salt))
    return table


def is_looping(run: Run) -> bool:
    """Whether a text repeats itself so much that drafting it is too easy."""
    return repeated_share(run.token_ids, 8) > LOOPING


def split(table: Table, num_prompts: int) -> dict[str, list[int]]:
    """Prompt numbers by whether the first plain output loops; empty groups are left out."""
    groups: dict[str, list[int]] = {"": [], "looping": []}
    for index in range(num_prompts):
        groups["looping" if is_looping(table[PLAIN][0][index]) else ""].append(index)
    return {name: members for name, members in groups.items() if members}


def sums(repeats: Sequence[Sequence[Run]], members: Sequence[int], what: str) -> list[float]:
    """Per repeat, the seconds of all members."""
    return [sum(getattr(runs[i], what) for i in members) for runs in repeats]


def summarize(table: Table, prompts: Sequence[list[int]], members: Sequence[int]) -> GroupResult:
    """One group of prompts, every arm."""
    arms = {}
    for name, repeats in table.items():
        kept = [runs[i] for runs in repeats for i in members]
        decode = sums(repeats, members, "decode_s")
        reference = [table[INVARIANT][0][i].token_ids for i in members]
        first = [repeats[0][i].token_ids for i in members]
        arms[name] = ArmResult(
            speedup=ratio_of_medians(sums(table[PLAIN], members, "decode_s"), decode),
            speedup_end_to_end=ratio_of_medians(
                sums(table[PLAIN], members, "total_s"), sums(repeats, members, "total_s")
            ),
            tokens_per_s=sum(len(ids) - 1 for ids in first) / statistics.median(decode),
            drafting_share=sum(r.drafting_s for r in kept) / sum(r.total_s for r in kept),
            acceptance=acceptance(kept),
            num_same=sum(a == b for a, b in zip(first, reference, strict=True)),
        )
    plain = [table[PLAIN][0][i] for i in members]
    return GroupResult(
        num_prompts=len(members),
        repeated_4grams=statistics.mean(repeated_share(run.token_ids, 4) for run in plain),
        repeated_8grams=statistics.mean(repeated_share(run.token_ids, 8) for run in plain),
        copied_8grams=statistics.mean(
            copied_share(table[PLAIN][0][i].token_ids, prompts[i], 8) for i in members
        ),
        arms=arms,
    )


def show(title: str, result: GroupResult) -> None:
    """One group as a table."""
    print(
        f"\n{title}: {result.num_prompts} prompts; plain output repeats "
        f"{result.repeated_4grams:.0%} of its 4-grams, {result.repeated_8grams:.0%} of its "
        f"8-grams, copies {result.copied_8grams:.0%} of its 8-grams from the prompt"
    )
    header = f"{'':22}{'tokens/s':>9}  {'speed-up':22}{'with prefill':22}"
    print(f"{header}{'length':>7} {'drafting':>8} {'same':>7}  by position")
    for name, arm in result.arms.items():
        positions = " ".join(f"{share:.2f}" for share in arm.acceptance.by_position)
        same = "" if "unseeded" in title else f"{arm.num_same}/{result.num_prompts}"
        print(
            f"{name:22}{arm.tokens_per_s:9.1f}  {arm.speedup!s:22}"
            f"{arm.speedup_end_to_end!s:22}{arm.acceptance.length:7.2f} "
            f"{arm.drafting_share:8.0%} {same:>7}  {positions}"
        )


def arms(settings: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Name and LLM settings of every arm."""
    found: dict[str, dict[str, Any]] = {
        PLAIN: {"batch_invariant": False},
        INVARIANT: {"batch_invariant": True},
    }
    speculative: dict[str, dict[str, Any]] = {}
    for k in settings.draft_k:
        config = {"method": "draft_model", "model": settings.draft}
        speculative[f"draft_model k={k}"] = config | {"num_speculative_tokens": k}
        for scheme in settings.draft_quantization:
            small = {"num_speculative_tokens": k, "quantization": scheme}
            speculative[f"draft_model {scheme} k={k}"] = config | small
    for k in settings.ngram_k:
        speculative[f"ngram k={k}"] = {"method": "ngram", "num_speculative_tokens": k}
    for method, counts in HEADS.items():
        if f"demo-{method}" in installed() and method in settings.heads:
            for k in counts:
                config = {"model": f"demo-{method}", "num_speculative_tokens": k}
                speculative[f"{method} k={k}"] = config
    for name, config in speculative.items():
        found[name] = {"batch_invariant": True, "speculative": config}
        if settings.fast:
            found[f"{name}, fast"] = {"batch_invariant": False, "speculative": config}
    return found


def workload(
    name: str, llms: Mapping[str, LLM], texts: Sequence[str], settings: argparse.Namespace
) -> dict[str, GroupResult]:
    """All ways of sampling on one set of prompts; keys are `name, sampling[, looping]`."""
    tokenizer = llms[PLAIN].get_tokenizer()
    prompts = [tokenizer.encode(text) for text in texts]
    lengths = [len(ids) for ids in prompts]
    print(f"\n{name}: prompts of {min(lengths)} to {max(lengths)} tokens")
    results = {}
    for kind in settings.samplings:
        table = measure(llms, prompts, kind, settings)
        for group, members in split(table, len(prompts)).items():
            title = ", ".join(filter(None, (name, kind, group)))
            results[title] = summarize(table, prompts, members)
            show(title, results[title])
    return results


def best(result: GroupResult, method: str) -> float:
    """The best speed-up among a method's arms."""
    return max(arm.speedup.value for name, arm in result.arms.items() if name.startswith(method))


def goals(results: Mapping[str, GroupResult]) -> list[Goal]:
    """What the project wants of its packaged pair; groups without prompts have no goal."""
    wrong = 0
    for title, result in results.items():
        if "unseeded" not in title:
            kept = [a for n, a in result.arms.items() if n != PLAIN and not n.endswith("fast")]
            wrong += sum(result.num_prompts - arm.num_same for arm in kept)
    name = "outputs that differ with speculation (greedy, seeded)"
    found = [Goal(name=name, wanted="0", measured=wrong, met=wrong == 0)]
    for title, result in results.items():
        if title == "held-out, greedy":
            found += length_goals(result)
        if title.startswith("held-out") and not title.endswith("looping"):
            speed = best(result, "draft_model")
            found.append(at_least(f"draft_model speed-up at its best k, {title}", speed, 1.6))
        if title == "edits, greedy":
            found.append(at_least(f"ngram speed-up, {title}", best(result, "ngram"), 1.6))
    return found


def length_goals(result: GroupResult) -> list[Goal]:
    """What the project wants of drafters on held-out functions, greedy."""
    found = []
    for arm, wanted in LENGTHS.items():
        if arm in result.arms:
            length = result.arms[arm].acceptance.length
            found.append(at_least(f"acceptance length, {arm}, held-out, greedy", length, wanted))
    speeds = [a.speedup.value for n, a in result.arms.items() if n.split(" ")[0] in HEADS]
    if speeds:
        found.append(at_least("best head's speed-up, held-out, greedy", max(speeds), 2.0))
    return found


def main() -> None:
    """Load every arm, measure the workloads, report."""
    parser = make_pair_parser(__doc__, tokens=128)
    parser.add_argument("--edits", type=int, default=8, help="edit prompts; default: %(default)s")
    parser.add_argument("--draft-k", type=int, nargs="+", default=[2, 3, 5, 7])
    parser.add_argument("--draft-quantization", nargs="+", default=["int8"],
                        choices=["int8", "int4"], help="of further arms' drafts")  # fmt: skip
    parser.add_argument("--ngram-k", type=int, nargs="+", default=[5, 10])
    parser.add_argument("--heads", nargs="*", default=list(HEADS), choices=HEADS)
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--fast", action="store_true", help="also speculate without invariance")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.prompts, settings.edits, settings.tokens = 2, 2, 1, 24
        settings.draft_k, settings.ngram_k = [2, 5], [5]
    use_threads(settings.threads)
    where = announce(settings)
    for method in settings.heads:
        if f"demo-{method}" not in installed():
            print(f"{method}: left out, demo-{method} is not installed")
    results = measure_all(settings)
    finish("methods", where, settings, results, goals(results))


def measure_all(settings: argparse.Namespace) -> dict[str, GroupResult]:
    """Fresh code and edits, each under every way of sampling."""
    llms = {name: build(settings.model, **config) for name, config in arms(settings).items()}
    texts = [p.text for p in heldout_prompts(settings.prompts, tokens=128)]
    results = workload("held-out", llms, texts, settings)
    if settings.edits:
        texts = [p.text for p in edit_prompts(settings.edits)]
        few = {n: llm for n, llm in llms.items() if "draft_model" not in n or "k=5" in n}
        results |= workload("edits", few, texts, settings)
    return results


if __name__ == "__main__":
    main()
