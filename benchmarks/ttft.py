"""Time to the first token with speculation over without it, one client.

    python benchmarks/ttft.py [--lengths 128 1024]

A drafter must not delay the first token: the draft model reads the prompt only after that token
is out. The second answer, which then waits for it, is shown too. Wanted: ratio of time to first
token <= 1.05 for every method and length.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common import (
    Ratio,
    announce,
    at_most,
    finish,
    in_turn,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from runs import build, greedy

from foretoken import LLM
from tools.python_text.heldout import heldout_prompts

OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokens:
    """Seconds from the call to the first step with output, and to the second."""

    first_s: float
    second_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult:
    """One method at one prompt length, means over prompts, median over repeats."""

    first_ms: float
    ratio: Ratio
    """Time to the first token over that without speculation."""
    second_ms: float
    second_ratio: Ratio


def first_tokens(llm: LLM, ids: list[int]) -> FirstTokens:
    """Stream two steps of output, then abort the request."""
    began = time.perf_counter()
    seconds: list[float] = []
    stream = llm.stream({"prompt_token_ids": ids}, greedy(64))
    for output in stream:
        if output.new_token_ids:
            seconds.append(time.perf_counter() - began)
        if len(seconds) == 2:
            break
    del stream
    return FirstTokens(first_s=seconds[0], second_s=seconds[1])


def measure(
    llms: dict[str, LLM], prompts: Sequence[list[int]], repeats: int
) -> dict[str, list[FirstTokens]]:
    """Per arm and repeat, the means over prompts; arms take turns prompt by prompt."""
    found: dict[str, list[FirstTokens]] = {name: [] for name in llms}
    for llm in llms.values():
        first_tokens(llm, prompts[0])
    for repeat in range(repeats):
        runs: dict[str, list[FirstTokens]] = {name: [] for name in llms}
        for index, ids in enumerate(prompts):
            for name in in_turn(list(llms), repeat * len(prompts) + index):
                runs[name].append(first_tokens(llms[name], ids))
        for name, kept in runs.items():
            first = statistics.mean(run.first_s for run in kept)
            second = statistics.mean(run.second_s for run in kept)
            found[name].append(FirstTokens(first_s=first, second_s=second))
    return found


def compare(table: dict[str, list[FirstTokens]]) -> dict[str, ArmResult]:
    """Every arm against the one without speculation."""
    results = {}
    off_first = [run.first_s for run in table[OFF]]
    off_second = [run.second_s for run in table[OFF]]
    for name, runs in table.items():
        first, second = [run.first_s for run in runs], [run.second_s for run in runs]
        results[name] = ArmResult(
            first_ms=statistics.median(first) * 1e3,
            ratio=ratio_of_medians(first, off_first),
            second_ms=statistics.median(second) * 1e3,
            second_ratio=ratio_of_medians(second, off_second),
        )
    return results


def prompts_of(llm: LLM, length: int, count: int) -> list[list[int]]:
    """Held-out prompts of exactly `length` tokens."""
    encode = llm.get_tokenizer().encode
    texts = [prompt.text for prompt in heldout_prompts(count, tokens=length * 3 // 2)]
    ids = [encode(text)[-length:] for text in texts]
    assert all(len(one) == length for one in ids), [len(one) for one in ids]
    return ids


def main() -> None:
    """Measure every length and method, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--prompts", type=int, default=8, help="default: %(default)s")
    parser.set_defaults(repeats=9)
    settings: argparse.Namespace = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.prompts = 2, 2
    use_threads(settings.threads)
    draft = {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": 5}
    llms = {
        OFF: build(settings.model),
        "draft_model k=5": build(settings.model, draft),
        "ngram k=5": build(settings.model, {"method": "ngram", "num_speculative_tokens": 5}),
    }
    where = announce(settings)
    results, goals = {}, []
    for length in settings.lengths:
        prompts = prompts_of(llms[OFF], length, settings.prompts)
        results[str(length)] = compare(measure(llms, prompts, settings.repeats))
        print(f"\nprompts of {length} tokens")
        for name, arm in results[str(length)].items():
            print(
                f"{name:16} first token {arm.first_ms:7.1f} ms, ratio {arm.ratio}; "
                f"second step {arm.second_ms:7.1f} ms, ratio {arm.second_ratio}"
            )
            if name != OFF:
                title = f"time to first token, {name}, {length} tokens, on / off"
                goals.append(at_most(title, arm.ratio.value, 1.05))
    finish("ttft", where, settings, results, goals)


if __name__ == "__main__":
    main()
