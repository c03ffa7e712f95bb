"""Adaptive control where pages are scarce: drafts' go first, and no request fails for them."""

from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.types import FinishReason

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
        assert parts.deciding.journal is not None
        found = parts.deciding.journal.describe()
        assert found["failed"] is None and found["drafters"][method]["draft_tokens"]
        assert parts.shared.num_reclaimed, "what drafters keep went first"
        assert parts.scheduler.kv_usage == 0.0
