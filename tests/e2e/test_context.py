"""A drafter takes memory, never context: the same length on and off, or no start."""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.types import FinishReason

PAGE = 16
PROMPT = {"prompt_token_ids": [3, 1, 4]}


def settings(model: Path, pages: int) -> dict[str, Any]:
    """Room for so many pages without a drafter: float32, two layers of two heads of 16."""
    token = 2 * 2 * 2 * 16 * 4
    return {
        "model": str(model),
        "dtype": "float32",
        "block_size": PAGE,
        "kv_cache_memory_bytes": pages * PAGE * token,
        "speculative_config": None,
        "adaptive_speculation": False,
    }


def answer(given: dict[str, Any]) -> tuple[tuple[int, ...], str]:
    """Tokens of a request that asks for more than there may be, and why it ended."""
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True, detokenize=False)
    with LLM(**given) as llm:
        [found] = llm.generate(PROMPT, params, use_tqdm=False)
    return found.outputs[0].token_ids, str(found.outputs[0].finish_reason)


def methods(model: Path) -> list[dict[str, Any]]:
    return [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"model": str(model), "num_speculative_tokens": 4},
    ]


@pytest.mark.parametrize("pages", [4, 9, 15, 16, 40])
def test_an_answer_is_as_long_with_a_drafter(model: Path, pages: int) -> None:
    plain = settings(model, pages)
    expected = answer(plain)
    for method in methods(model):
        drafted = {**plain, "speculative_config": method}
        try:
            assert answer(drafted) == expected
        except ConfigError as error:
            assert error.field == "speculative_config"
            fits = int(str(error).split("max_model_len=")[1].split(";")[0])
            shorter = answer({**plain, "max_model_len": fits})
            assert answer({**drafted, "max_model_len": fits}) == shorter
            assert len(shorter[0]) < len(expected[0])


PROMPTS = [f"def f{number}(a, b):\n" + "    a += b\n" * (number % 7) for number in range(24)]
PARAMS = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16}
DRAFTERS = {
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4},
}


def token_bytes(llm: LLM) -> int:
    """What a token takes of the target's pages."""
    parts = llm._engine.parts
    return parts.runner.store.page_bytes // parts.config.page_size


@pytest.fixture(scope="module")
def plain() -> tuple[list[list[int]], int]:
    with LLM("demo", **SETTINGS) as llm:
        return texts(llm), token_bytes(llm)


def texts(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert {one.outputs[0].finish_reason for one in found} == {FinishReason.LENGTH}
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize("method", DRAFTERS)
@pytest.mark.parametrize("tokens", [320, 800])
def test_short_of_pages_drafts_go_and_requests_do_not(
    plain: tuple[list[list[int]], int], method: str, tokens: int
) -> None:
    expected, size = plain
    settings = {**SETTINGS, "kv_cache_memory_bytes": tokens * size}
    with LLM("demo", **settings, speculative_config=DRAFTERS[method]) as llm:
        parts = llm._engine.parts
        if parts.shared is None:
            pytest.skip("this device does not give memory back")
        for _ in range(2):
            assert texts(llm) == expected
            parts.shared.check_integrity()
        assert parts.controller.journal is not None
        found = parts.controller.journal.describe()
        assert found["failed"] is None and found["drafters"][method]["draft_tokens"]
        assert parts.shared.num_reclaimed, "what drafters keep went first"
        assert parts.scheduler.kv_usage == 0.0
