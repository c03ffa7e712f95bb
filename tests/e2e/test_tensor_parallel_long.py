"""Speculation on and off, one process and several, whole and rounded weights, short of pages and
with prefix hits: one and the same text, some 10,000 tokens of it, in the full suite far more.

Several processes share every layer, a draft model's too, or have some layers each.
"""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts
from tests.marks import needs_kernels

TOKENS = 48
QUICK, FULL = 16, 44
RUNS = ("seeded", "logprobs")
SHORT = {**PRESSURES["shortage"], "kv_cache_memory_bytes": 90_000, "max_model_len": 144}
CHOICES = [[0], [0, 0], [0, 0, 0], [0, 1], [1], [1, 0], [2]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
    "draft tree": {"method": "draft_model", "choices": CHOICES},
    "eagle3": HEADS["eagle3"],
    "eagle tree": {"method": "eagle", "choices": CHOICES},
    "medusa": HEADS["medusa"],
}
PROCESSES: dict[str, dict[str, Any]] = {
    "one": {},
    "shared": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}

pytestmark = needs_kernels


def speculative(drafter: str, draft: Path, root: Path) -> dict[str, Any]:
    keys = DRAFTERS[drafter]
    if keys["method"] == "draft_model":
        return {**keys, "model": str(draft)}
    if drafter == "ngram":
        return keys
    head = drafter.partition(" ")[0]
    return {**keys, "model": str(write_head(root / head, head, draft))}


def open_llm(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), dtype="bfloat16", adaptive_speculation=False, **settings)


def run(llm: LLM, parameters: str, count: int) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    return generate(llm, make_prompts(count, 3), chosen)


def compare(
    model: Path, config: dict[str, Any], bits: str, runs: tuple[str, ...], count: int
) -> int:
    """Tokens that were compared; every run comes twice, the second with prefixes that are kept."""
    calm = PRESSURES["one at a time"]
    with open_llm(model, quantization=bits, **calm) as plain:
        wanted = {name: run(plain, name, count) for name in runs}
    compared = 0
    for name, processes in PROCESSES.items():
        settings = {"quantization": bits, "speculative_config": config, **processes, **SHORT}
        with open_llm(model, **settings) as llm:
            found = {turn: run(llm, turn, count) for turn in runs}
            again = {turn: run(llm, turn, count) for turn in runs}
            scheduler = llm._engine.parts.scheduler
            assert scheduler.num_preemptions > 0, "the shortage is real"
            assert scheduler.prefix is not None and scheduler.prefix.num_hit_tokens > 0
        assert found == wanted and again == wanted, name
        each = [one for results in (found, again) for turn in runs for one in results[turn]]
        compared += sum(len(one.token_ids) for one in each)
    return compared


@pytest.mark.slow
def test_ten_thousand_tokens(model: Path, draft: Path, tmp_path: Path) -> None:
    total = compare(model, speculative("eagle3", draft, tmp_path), "int8", RUNS[:1], QUICK)
    total += compare(model, speculative("draft model", draft, tmp_path), "int4", RUNS[1:], QUICK)
    assert total >= 10_000, total


@pytest.mark.slow
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_many_thousand_tokens(
    drafter: str, bits: str, model: Path, draft: Path, tmp_path: Path
) -> None:
    """At least 50,000 in each case."""
    runs = (*RUNS, "filters", "greedy penalties")
    config = speculative(drafter, draft, tmp_path)
    assert compare(model, config, bits, runs, FULL) >= 50_000
