"""The promises hold with int8 keys and values, of the target, of the drafter, of both.

The guarded bugs: stored bits that depend on the chunk, the batch or the branch they were written
in, a rolled-back or moved slot without its scale, a setting that changes nothing.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.testing import JunkProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    generate,
    make_prompts,
    with_model,
)

TOKENS, COUNT = 24, 8
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": METHODS["ngram"],
    "draft": {**METHODS["draft auto"], "kv_cache_dtype": "int8"},
    "wide draft": METHODS["draft auto"],
    "tree": {"method": "draft_model", "choices": TREE, "kv_cache_dtype": "int8"},
    "eagle3": {**HEADS["eagle3"], "kv_cache_dtype": "int8"},
    "dflash": {**HEADS["dflash"], "kv_cache_dtype": "int8"},
    "dspark": {**HEADS["dspark"], "kv_cache_dtype": "int8"},
}

FEW = {"draft": 28_000, "tree": 28_000, "eagle3": 28_000, "dflash": 28_000}
"""Bytes for keys and values that are about twenty pages of 8 tokens."""


def open_llm(model: Path, speculative: dict[str, Any] | None, **settings: Any) -> LLM:
    """A target with int8 keys and values, unless `settings` say otherwise."""
    kept: Any = {"dtype": "float32", "batch_invariant": True, "kv_cache_dtype": "int8"}
    kept |= {"adaptive_speculation": False, **settings}
    return LLM(str(model), speculative_config=speculative, **kept)


def run(llm: LLM, parameters: str) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    return generate(llm, make_prompts(COUNT, 3), chosen)


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[Callable[[str], list[Result]]]:
    with open_llm(model, None, **PRESSURES["one at a time"]) as llm:
        yield cache(partial(run, llm))


@pytest.fixture(scope="module")
def drafters(folders: dict[str, Path], draft: Path) -> dict[str, dict[str, Any]]:
    return {
        name: {**one, "model": str(folders[name])} if name in HEADS else with_model(one, draft)
        for name, one in DRAFTERS.items()
    }


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafters_change_no_token(
    name: str, model: Path, drafters: dict[str, Any], plain: Any
) -> None:
    """Greedy, seeded with filters, with penalties, with logprobs: identical."""
    with open_llm(model, drafters[name], **PRESSURES["calm"]) as llm:
        for parameters in ("greedy", "filters", "greedy penalties", "logprobs"):
            assert run(llm, parameters) == plain(parameters)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_chunks_and_prefix_hits_change_no_token(
    name: str, model: Path, drafters: dict[str, Any], plain: Any
) -> None:
    with open_llm(model, drafters[name], **PRESSURES["chunks"]) as llm:
        for _ in range(2):
            assert run(llm, "logprobs") == plain("logprobs")


@pytest.mark.parametrize("name", FEW)
def test_preemption_changes_no_token(
    name: str, model: Path, drafters: dict[str, Any], plain: Any
) -> None:
    few = {"kv_cache_memory_bytes": FEW[name], "block_size": 8, "max_model_len": 128}
    with open_llm(model, drafters[name], **few) as llm:
        assert llm._engine.parts.config.num_pages < 24
        params = SamplingParams(**PARAMETERS["seeded"], max_tokens=TOKENS, detokenize=False)
        outputs = llm.generate(make_prompts(COUNT, 3), params, use_tqdm=False)
        metrics = [output.outputs[0].metrics for output in outputs]
        assert sum(one.num_preemptions for one in metrics if one is not None) > 0
        found = [output.outputs[0].token_ids for output in outputs]
        assert found == [result.token_ids for result in plain("seeded")]


@pytest.mark.slow
@pytest.mark.parametrize("pressure", ["calm", "chunks"])
def test_batches_and_junk_change_no_token(pressure: str, model: Path, plain: Any) -> None:
    for proposer in (None, JunkProposer(VOCAB, seed=1)):
        with open_llm(model, None, proposer=proposer, **PRESSURES[pressure]) as llm:
            for parameters in ("logprobs", "several"):
                assert run(llm, parameters) == plain(parameters)


@pytest.mark.parametrize("name", ["draft", "tree", "eagle3", "dspark"])
def test_an_int8_drafter_leaves_a_wide_target_alone(
    name: str, model: Path, drafters: dict[str, Any]
) -> None:
    found = []
    for speculative in (None, drafters[name]):
        with open_llm(model, speculative, kv_cache_dtype="auto", max_num_seqs=16) as llm:
            found.append([run(llm, parameters) for parameters in ("greedy", "logprobs")])
    assert found[0] == found[1]


def test_int8_is_another_model(model: Path, plain: Any) -> None:
    with open_llm(model, None, kv_cache_dtype="auto", max_num_seqs=16) as llm:
        assert run(llm, "logprobs") != plain("logprobs")


def test_more_tokens_fit(model: Path) -> None:
    pages = []
    for kept in ("auto", "int8"):
        settings = {"dtype": "bfloat16", "kv_cache_memory_bytes": 180_000, "block_size": 8}
        with open_llm(model, None, kv_cache_dtype=kept, **settings) as llm:
            pages.append(llm._engine.parts.config.num_pages)
    assert pages[1] > 1.5 * pages[0]
