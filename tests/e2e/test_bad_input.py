"""Every mistake of a user is an exception of our tree that names the field; nobody else suffers."""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    ForetokenError,
    ModelNotFoundError,
    ParameterError,
    PromptError,
    TokenizerError,
)
from foretoken.testing import write_tiny_llama
from foretoken.types import FinishReason

PARAMS = SamplingParams(max_tokens=8, temperature=0.0, detokenize=False)
GOOD = {"prompt_token_ids": [1, 2, 3]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=64)


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
        ({"stop": "x"}, "stop or bad_words"),
        ({"bad_words": ["x"]}, "stop or bad_words"),
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


def test_a_request_that_can_never_fit(folder: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "block_size": 8}
    with LLM(str(folder), kv_cache_memory_bytes=3 * 8 * 512, **settings) as small:
        with pytest.raises(CapacityError, match="KV cache"):
            small.generate([{"prompt_token_ids": [1] * 100}], PARAMS, use_tqdm=False)
        [output] = small.generate([GOOD], PARAMS, use_tqdm=False)
        assert output.outputs[0].finish_reason == FinishReason.LENGTH
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        LLM(str(folder), kv_cache_memory_bytes=100, **settings)


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


def test_a_step_that_fails_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    [alone] = llm.generate([GOOD], PARAMS, use_tqdm=False)
    runner = llm._engine.parts.runner

    def broken(batch: Any) -> Any:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", broken)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate([GOOD], PARAMS, use_tqdm=False)
    assert not llm._engine.has_unfinished
    [again] = llm.generate([GOOD], PARAMS, use_tqdm=False)
    assert again.outputs[0].token_ids == alone.outputs[0].token_ids


def test_an_abort_ends_a_request_once(llm: LLM) -> None:
    engine = llm._engine
    [request] = engine.make_requests("gone", [1, 2, 3], PARAMS)
    engine.add_request(request)
    engine.step()
    output = engine.abort("gone")
    assert output is not None
    assert output.finish_reason == FinishReason.ABORT
    assert engine.abort("gone") is None
    assert engine.step() == []


def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    stream = llm.stream(GOOD, PARAMS)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm._engine.has_unfinished


def test_models_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError) as caught:
        LLM(str(tmp_path / "nothing"))
    assert caught.value.given == str(tmp_path / "nothing")


def test_truncated_weights_are_named(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        LLM(str(folder))


def test_a_tokenizer_that_is_named_must_exist(folder: Path, tmp_path: Path) -> None:
    with pytest.raises((TokenizerError, ModelNotFoundError)):
        LLM(str(folder), tokenizer=str(tmp_path / "missing"))


def test_too_long_a_context(folder: Path) -> None:
    with pytest.raises(ConfigError, match="at most 256"):
        LLM(str(folder), max_model_len=257)


def test_a_closed_llm_says_so(folder: Path) -> None:
    llm = LLM(str(folder), dtype="float32")
    llm.close()
    llm.close()
    with pytest.raises(ConfigError, match="closed"):
        llm.generate([GOOD], PARAMS, use_tqdm=False)
