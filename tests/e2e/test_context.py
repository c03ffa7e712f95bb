"""A drafter takes memory, never context: the same length on and off, or no start."""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.testing import write_tiny_llama

PAGE = 16
PROMPT = {"prompt_token_ids": [3, 1, 4]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def settings(folder: Path, pages: int) -> dict[str, Any]:
    """Room for so many pages without a drafter: float32, two layers of two heads of 16."""
    token = 2 * 2 * 2 * 16 * 4
    return {
        "model": str(folder),
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


def methods(folder: Path) -> list[dict[str, Any]]:
    return [
        {"method": "ngram", "num_speculative_tokens": 4},
        {"model": str(folder), "num_speculative_tokens": 4},
    ]


@pytest.mark.parametrize("pages", [4, 9, 15, 16, 40])
def test_an_answer_is_as_long_with_a_drafter(folder: Path, pages: int) -> None:
    plain = settings(folder, pages)
    expected = answer(plain)
    for method in methods(folder):
        drafted = {**plain, "speculative_config": method}
        try:
            assert answer(drafted) == expected
        except ConfigError as error:
            assert error.field == "speculative_config"
            fits = int(str(error).split("max_model_len=")[1].split(";")[0])
            shorter = answer({**plain, "max_model_len": fits})
            assert answer({**drafted, "max_model_len": fits}) == shorter
            assert len(shorter[0]) < len(expected[0])
