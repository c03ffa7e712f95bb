"""`quantization="auto"` of a draft: when int8 is taken. The guarded bugs: a coin toss decides, or
the choice leaks into the output."""

import logging
from pathlib import Path

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.errors import ForetokenError
from foretoken.kernels.library import find_library
from foretoken.proposers import draft_quantization
from foretoken.proposers.draft_quantization import pays
from foretoken.testing import write_tiny_llama


def test_faster_beyond_the_noise_pays() -> None:
    plain = [1.0, 1.3, 0.9, 1.0, 1.0, 0.9, 1.0, 1.1, 1.0]
    assert pays(plain, [0.6, 1.1, 0.7, 0.6, 0.6, 0.7, 0.8, 1.5, 0.6])
    assert not pays(plain, [0.6, 1.1, 0.7, 0.6, 1.2, 0.7, 0.8, 1.5, 0.6])
    assert not pays(plain, [0.99 * seconds for seconds in plain])
    assert not pays([0.6] * 9, plain)


def test_only_draft_models_are_rounded_if_that_pays() -> None:
    given = {"model": "demo-draft", "quantization": "auto"}
    assert SpeculativeConfig.from_dict(given).quantization == "auto"
    with pytest.raises(ForetokenError, match="quantization"):
        SpeculativeConfig.from_dict({"method": "ngram", "quantization": "auto"})


@pytest.mark.parametrize("method", ["eagle3", "mlp", "medusa"])
def test_heads_are_rounded_at_load_or_not_at_all(method: str) -> None:
    given = {"method": method, "model": f"demo-{method}", "num_speculative_tokens": 2}
    assert SpeculativeConfig.from_dict({**given, "quantization": "int8"}).quantization == "int8"
    for other in ("auto", "gptq"):
        with pytest.raises(ForetokenError, match="quantization"):
            SpeculativeConfig.from_dict({**given, "quantization": other})


@pytest.mark.parametrize("method", ["eagle3", "mlp", "medusa"])
def test_a_rounded_head_says_the_same(method: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}]
    tokens = []
    for config in (None, {"method": method, "num_speculative_tokens": 3, "quantization": "int8"}):
        with LLM("demo", speculative_config=config) as llm:
            [output] = llm.generate(prompts, params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.skipif(find_library() is None, reason="without kernels nothing is timed")
@pytest.mark.parametrize("wins", [True, False])
def test_the_choice_is_logged_and_leaves_the_output_alone(
    wins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}]
    monkeypatch.setattr(draft_quantization, "pays", lambda before, after: wins)
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    tokens = []
    for config in (None, {"model": str(folder), "quantization": "auto"}):
        with (
            caplog.at_level(logging.INFO, logger="foretoken"),
            LLM(str(folder), dtype="float32", speculative_config=config) as llm,
        ):
            [output] = llm.generate(prompts, params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert ("int8 weights (auto)" in caplog.text) == wins
    assert torch.is_inference_mode_enabled() is False
