"""What a step of the packaged target costs: against a draft step, by rows, by invariance.

    python benchmarks/step_cost.py [--model demo --draft demo-draft]

Steps in the engine include head, sampling and Python: the target's is a plain decoding step, the
draft's is the time spent drafting per drafted token under draft_model k=5. Wanted: target over
draft >= 8. Bare forwards then show what verifying 1 to 16 rows costs, invariance on and off.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common import (
    Ratio,
    announce,
    at_least,
    finish,
    interleave,
    make_parser,
    ratio_of_medians,
    use_threads,
)
from forwards import draft_probe, target_probe
from runs import build, greedy, run_once

from foretoken import LLM
from tools.python_text.heldout import heldout_prompts

MAIN = "engine: target fast / draft"
MODES = {"invariant": True, "fast": False}
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14, 16)


def step_seconds(llm: LLM, ids: list[int], tokens: int) -> Callable[[], float]:
    """Time per step of plain decoding."""

    def measure() -> float:
        return run_once(llm, ids, greedy(tokens)).decode_s / (tokens - 1)

    return measure


def drafting_seconds(llm: LLM, ids: list[int], tokens: int) -> Callable[[], float]:
    """Time spent in the drafter per token it drafted; the prompt's pass is measured apart."""

    def totals() -> dict[str, Any]:
        return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}

    def spent(count: int) -> tuple[float, int]:
        before = totals()
        run_once(llm, ids, greedy(count))
        after = totals()
        seconds = after["foretoken:drafting_seconds"] - before["foretoken:drafting_seconds"]
        name = "vllm:spec_decode_num_draft_tokens"
        return seconds, after[name] - before[name]

    def measure() -> float:
        first_s, first = spent(3)
        all_s, drafted = spent(tokens)
        return (all_s - first_s) / (drafted - first)

    return measure


def milliseconds(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Medians."""
    return {name: statistics.median(seconds) * 1e3 for name, seconds in times.items()}


def engine_steps(llms: Mapping[str, LLM], settings: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per repeat of a target step in both modes and of a draft step."""
    encode = llms["fast"].get_tokenizer().encode
    [prompt] = heldout_prompts(1, tokens=128)
    ids = encode(prompt.text)
    arms = {f"target {mode}": step_seconds(llms[mode], ids, settings.tokens) for mode in MODES}
    arms["draft"] = drafting_seconds(llms["speculating"], ids, settings.tokens)
    return interleave(arms, settings.repeats)


def bare_forwards(llms: Mapping[str, LLM], settings: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per repeat of a pass by mode and rows, and of one draft row."""
    arms: dict[str, Callable[[], float]] = {}
    for mode in MODES:
        probe = target_probe(llms[mode], settings.context)
        for rows in settings.rows:
            arms[f"{mode} {rows}"] = probe.timer(rows, settings.times)
    draft = draft_probe(llms["speculating"], settings.context)
    arms["draft 1"] = draft.timer(1, settings.times)
    return interleave(arms, settings.repeats)


def compare(
    steps: Mapping[str, Sequence[float]], bare: Mapping[str, Sequence[float]], rows: Sequence[int]
) -> dict[str, Ratio]:
    """The ratios worth reading."""
    invariant, fast, draft = steps["target invariant"], steps["target fast"], steps["draft"]
    ratios = {
        MAIN: ratio_of_medians(fast, draft),
        "engine: target invariant / draft": ratio_of_medians(invariant, draft),
        "engine: target invariant / fast": ratio_of_medians(invariant, fast),
        "bare: target fast 1 row / draft 1 row": ratio_of_medians(bare["fast 1"], bare["draft 1"]),
    }
    for mode in MODES:
        for n in rows:
            ratio = ratio_of_medians(bare[f"{mode} {n}"], bare[f"{mode} 1"])
            ratios[f"bare, {mode}: {n} rows / 1 row"] = ratio
    for n in rows:
        ratio = ratio_of_medians(bare[f"invariant {n}"], bare[f"fast {n}"])
        ratios[f"bare: {n} rows, invariant / fast"] = ratio
    return ratios


def main() -> None:
    """Measure steps and forwards, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="1 among them")
    parser.add_argument("--context", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=30, help="passes per timing")
    parser.set_defaults(repeats=9)
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.rows, settings.tokens, settings.times = 2, [1, 6], 24, 3
    use_threads(settings.threads)
    config = {"method": "draft_model", "model": settings.draft, "num_speculative_tokens": 5}
    llms = {mode: build(settings.model, batch_invariant=on) for mode, on in MODES.items()}
    llms["speculating"] = build(settings.model, config)
    where = announce(settings)
    steps, bare = engine_steps(llms, settings), bare_forwards(llms, settings)
    ratios = compare(steps, bare, settings.rows)
    tables = {"engine_step_ms": milliseconds(steps), "bare_forward_ms": milliseconds(bare)}
    for title, table in tables.items():
        print(title, {name: round(value, 3) for name, value in table.items()})
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    goals = [at_least(MAIN, ratios[MAIN].value, 8.0)]
    finish("step_cost", where, settings, {**tables, "ratios": ratios}, goals)


if __name__ == "__main__":
    main()
