"""Speculation on and off, one process and several, whole and rounded weights, short of pages and
with prefix hits: one and the same text, some 5,000 tokens of it, in the full suite many times that.
"""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.kernels.library import find_library
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts

TOKENS = 48
QUICK, FULL = 21, 42
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


@pytest.fixture(autouse=True)
def _kernels() -> None:
    if find_library() is None:
        pytest.skip("no compiled kernels")


def speculative(drafter: str, draft: Path, root: Path) -> dict[str, Any]:
    keys = DRAFTERS[drafter]
    if keys["method"] == "draft_model":
        return {**keys, "model": str(draft)}
    if drafter == "ngram":
        return keys
    head = drafter.partition(" ")[0]
    return {**keys, "model": str(write_head(root / head, head, draft))}


def open_llm(model: Path, ranks: int, **settings: Any) -> LLM:
    return LLM(
        str(model),
        tensor_parallel_size=ranks,
        dtype="bfloat16",
        adaptive_speculation=False,
        **settings,
    )


def run(llm: LLM, parameters: str, count: int) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    return generate(llm, make_prompts(count, 3), chosen)


def compare(
    model: Path, config: dict[str, Any], bits: str, runs: tuple[str, ...], count: int
) -> int:
    """Tokens that were compared; every run comes twice, the second with prefixes that are kept."""
    calm = PRESSURES["one at a time"]
    with open_llm(model, 1, quantization=bits, **calm) as plain:
        wanted = {name: run(plain, name, count) for name in runs}
    compared = preempted = 0
    for ranks in (1, 2):
        settings = {"quantization": bits, "speculative_config": config, **SHORT}
        with open_llm(model, ranks, **settings) as llm:
            for name in (*runs, *runs):
                found = run(llm, name, count)
                assert found == wanted[name], (ranks, name)
                compared += sum(len(one.token_ids) for one in found)
                preempted += sum(one.num_preemptions for one in found)
    assert preempted > 0, "the shortage is real"
    return compared


@pytest.mark.slow
def test_five_thousand_tokens(model: Path, draft: Path, tmp_path: Path) -> None:
    total = compare(model, speculative("eagle3", draft, tmp_path), "int8", RUNS[:1], QUICK)
    total += compare(model, speculative("draft model", draft, tmp_path), "int4", RUNS[1:], QUICK)
    assert total >= 5_000, total


@pytest.mark.full
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_many_thousand_tokens(
    drafter: str, bits: str, model: Path, draft: Path, tmp_path: Path
) -> None:
    """At least 30,000 in each case."""
    runs = (*RUNS, "filters", "greedy penalties")
    config = speculative(drafter, draft, tmp_path)
    assert compare(model, config, bits, runs, FULL) >= 30_000
