"""Every mistake of a user is an exception of our tree that names the field; nobody else suffers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import (
    CapacityError,
    ConfigError,
    ForetokenError,
    ModelNotFoundError,
    ParameterError,
    PromptError,
    TokenizerError,
)
from foretoken.types import FinishReason

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False)
GOOD = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), dtype="float32", max_model_len=64)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1] * 64}, "prompt"),
        ({"prompt_token_ids": [1] * 1000}, "prompt"),
        ({"prompt_token_ids": [5, 97]}, "prompt_token_ids"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids"),
        ({"prompt_token_ids": [1.5]}, "prompt_token_ids"),
        ({"text": "x"}, "prompt"),
        ("text without a tokenizer", "prompt"),
        ({"prompt_token_ids": [True, 2]}, "prompt_token_ids"),
        ({"prompt_token_ids": [None]}, "prompt_token_ids"),
        ({"prompt_token_ids": ["1"]}, "prompt_token_ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids"),
        ({"prompt_token_ids": 12}, "prompt_token_ids"),
        ({"prompt_token_ids": b"12"}, "prompt_token_ids"),
        ({"prompt_token_ids": None}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": b"text"}, "prompt"),
        ({"prompt_token_ids": [1], "cache_salt": 3}, "cache_salt"),
        ({1: 2}, "prompt"),
        (None, "prompt"),
        (2.5, "prompt"),
        (b"text", "prompt"),
        ([], "prompt"),
        ([True], "prompt_token_ids"),
        (np.array([True]), "prompt_token_ids"),
        (np.array([1.0]), "prompt_token_ids"),
        ({"prompt_token_ids": torch.tensor([True])}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array([[1, 2]])}, "prompt_token_ids"),
        ({"prompt_token_ids": np.array(5)}, "prompt_token_ids"),
        ([1, None], "prompt_token_ids"),
    ],
)
def test_a_bad_prompt_starts_nothing(llm: LLM, prompt: Any, field: str) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate([GOOD, prompt], PARAMS, use_tqdm=False)
    assert caught.value.field == field
    assert caught.value.allowed
    [output] = llm.generate([GOOD], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"allowed_token_ids": [3, 97]}, "allowed_token_ids"),
        ({"logit_bias": {400: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [97]}, "stop_token_ids"),
        ({"stop": "x"}, "stop"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_parameters_beyond_the_model(llm: LLM, parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        llm.generate([GOOD], SamplingParams(**parameters), use_tqdm=False)
    assert caught.value.field == field


def test_numbers_that_do_not_match(llm: LLM) -> None:
    with pytest.raises(PromptError, match="sampling_params"):
        llm.generate([GOOD, GOOD], [PARAMS], use_tqdm=False)
    with pytest.raises(PromptError, match="priority"):
        llm.generate([GOOD], PARAMS, use_tqdm=False, priority=[1, 2])


@pytest.mark.parametrize(
    "prompts",
    [
        {"prompt_token_ids": [np.int64(5), 6, 7]},
        {"prompt_token_ids": np.arange(5, 8)},
        {"prompt_token_ids": torch.arange(5, 8)},
        np.arange(5, 8, dtype=np.uint8),
        [np.int64(5), np.int64(6), np.int64(7)],
        torch.arange(5, 8),
        np.arange(5, 8)[None],
        [torch.arange(5, 8)],
    ],
    ids=repr,
)
def test_ids_may_be_numpys_and_torchs(llm: LLM, prompts: Any) -> None:
    [expected] = llm.generate([{"prompt_token_ids": [5, 6, 7]}], PARAMS, use_tqdm=False)
    priority: Any = np.zeros(1, dtype=int)
    [output] = llm.generate(prompts, PARAMS, use_tqdm=False, priority=priority)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert output.prompt_token_ids == (5, 6, 7)
    assert {type(one) for one in output.prompt_token_ids} == {int}


@pytest.mark.parametrize(
    "prompts", [None, 5, True, b"text", bytearray(b"x"), 2.5, object(), np.array(5)]
)
def test_what_is_no_list_of_prompts(llm: LLM, prompts: Any) -> None:
    with pytest.raises(PromptError) as caught:
        llm.generate(prompts, PARAMS, use_tqdm=False)
    assert caught.value.field == "prompts"
    with pytest.raises(PromptError):
        next(llm.stream(prompts, PARAMS))


@pytest.mark.parametrize("given", [{"temperature": 0}, "greedy", 3, ["greedy"], [None], [{}]])
def test_what_are_no_parameters(llm: LLM, given: Any) -> None:
    with pytest.raises(ParameterError, match="sampling_params"):
        llm.generate([GOOD], given, use_tqdm=False)
    with pytest.raises(ParameterError, match="sampling_params"):
        next(llm.stream(GOOD, given))


@pytest.mark.parametrize("given", ["1", [None], ["1"], [1.5], [True], 3])
def test_what_are_no_priorities(llm: LLM, given: Any) -> None:
    with pytest.raises(PromptError, match="priority"):
        llm.generate([GOOD, GOOD], PARAMS, use_tqdm=False, priority=given)


def test_an_empty_text_is_the_token_that_begins_one() -> None:
    """Of a tokenizer that has such a token; where there is none, it is an error."""
    with LLM("demo", kv_cache_memory_bytes=8 << 20, max_model_len=128) as demo:
        [found] = demo.generate("", PARAMS, use_tqdm=False)
        assert found.prompt_token_ids == (demo.get_tokenizer().bos_token_id,)
        with pytest.raises(PromptError, match="at least one token"):
            demo.generate({"prompt_token_ids": []}, PARAMS, use_tqdm=False)


@pytest.mark.parametrize("messages", [None, 3, "hello", b"hello", ["hello"], [None], [3, 4], [[3]]])
def test_what_is_no_conversation(messages: Any) -> None:
    with (
        LLM("demo", kv_cache_memory_bytes=8 << 20, max_model_len=128) as demo,
        pytest.raises(PromptError) as caught,
    ):
        demo.chat(messages, PARAMS, use_tqdm=False)
    assert caught.value.field == "messages"


def test_a_request_that_can_never_fit(model: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8}
    with LLM(str(model), kv_cache_memory_bytes=3 * 8 * 512, **settings) as small:
        with pytest.raises(CapacityError, match="KV cache"):
            small.generate([{"prompt_token_ids": [1] * 100}], PARAMS, use_tqdm=False)
        [output] = small.generate([GOOD], PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == FinishReason.LENGTH
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        LLM(str(model), kv_cache_memory_bytes=100, **settings)


def test_a_bad_request_does_not_hurt_running_ones(llm: LLM) -> None:
    """The neighbour's tokens are those it has without the mistake."""
    [alone] = llm.generate([GOOD], PARAMS, use_tqdm=False)
    engine = llm._engine
    [request] = engine.make_requests("good", [1, 2, 3], PARAMS)
    engine.add_request(request)
    tokens: list[int] = []
    while engine.has_unfinished:
        for bad in ([], [1] * 64, [97]):
            with pytest.raises(ForetokenError):
                engine.make_requests("bad", bad, PARAMS)
        for output in engine.step():
            tokens.extend(output.new_token_ids)
    assert tuple(tokens) == alone.outputs[0].token_ids


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        LLM(str(tmp_path / "nothing"))
    assert caught.value.given == str(tmp_path / "nothing")


def test_a_tokenizer_that_is_named_must_exist(model: Path, tmp_path: Path) -> None:
    with pytest.raises((TokenizerError, ModelNotFoundError)):
        LLM(str(model), tokenizer=str(tmp_path / "missing"))


def test_too_long_a_context(model: Path) -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        LLM(str(model), max_model_len=257)


def test_a_closed_llm_says_so(model: Path) -> None:
    llm = LLM(str(model), dtype="float32")
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate([GOOD], PARAMS, use_tqdm=False)
