"""Every rule through the whole engine: exact where it says so, marked where it is not."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.metrics import Gauge
from foretoken.testing import write_tiny_llama
from tests.e2e.lossless import PARAMETERS, PRESSURES, generate, make_prompts
from tests.property.exact import assert_alike

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "batch_invariant": True,
    "adaptive_speculation": False,
}


def open_llm(model: Path, draft: Path, rule: str, **others: Any) -> LLM:
    config = {"model": str(draft), "num_speculative_tokens": 4, "rejection_sample_method": rule}
    return LLM(str(model), speculative_config={**config, **others}, **SETTINGS)


@pytest.mark.parametrize("rule", ["matching", "standard", "block", "typical"])
def test_greedy_requests_are_identical_under_every_rule(
    rule: str, model: Path, draft: Path
) -> None:
    prompts = make_prompts(10, 4)
    with LLM(str(model), **SETTINGS, **PRESSURES["one at a time"]) as plain:
        with open_llm(model, draft, rule) as llm:
            for name in ("greedy", "greedy penalties"):
                chosen = {"max_tokens": 32, **PARAMETERS[name]}
                assert generate(llm, prompts, chosen) == generate(plain, prompts, chosen)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_tokens_have_the_plain_distribution(rule: str, model: Path, tmp_path: Path) -> None:
    """Four tokens, without and with speculation: a two-sample chi-square of what came out."""
    samples = 1200
    params = SamplingParams(
        max_tokens=4, temperature=1.0, top_k=2, n=samples, detokenize=False, ignore_eos=True
    )
    prompt = {"prompt_token_ids": [5, 17, 3]}
    counts: list[Counter[tuple[int, ...]]] = []
    draft = write_tiny_llama(tmp_path, seed=1, scale=2.4)
    for config in (None, {"model": str(draft), "rejection_sample_method": rule}):
        with LLM(str(model), speculative_config=config, seed=3, **SETTINGS) as llm:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            counts.append(Counter(out.token_ids for out in output.outputs))
            if config is not None:
                [length] = [m for m in llm.get_metrics() if m.name == "foretoken:acceptance_length"]
                assert isinstance(length, Gauge) and length.value > 1.1
    assert_alike(*counts, least_freedom=3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_synthetic_output_says_that_it_is_invalid(
    temperature: float, model: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = make_prompts(6, 5)
    params = SamplingParams(max_tokens=60, temperature=temperature, seed=3, detokenize=False)
    found = []
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "foretoken"):
            with open_llm(model, draft, "synthetic", synthetic_acceptance_length=3.5) as llm:
                found.append(llm.generate(prompts, params, use_tqdm=False))
    assert "INVALID" in caplog.text
    for request in found[0]:
        assert not request.valid and not request.outputs[0].valid
        metrics = request.outputs[0].metrics
        assert metrics is not None and metrics.acceptance_length == pytest.approx(3.5, abs=0.5)
    ids = [[request.outputs[0].token_ids for request in run] for run in found]
    assert ids[0] == ids[1], "not reproducible"


def test_typical_says_that_it_is_lossy(
    model: Path, draft: Path, caplog: pytest.LogCaptureFixture
) -> None:
    params = SamplingParams(max_tokens=16, temperature=0.8, seed=3, detokenize=False)
    with caplog.at_level(logging.WARNING, "foretoken"):
        with open_llm(model, draft, "typical", posterior_threshold=0.01) as llm:
            (output,) = llm.generate(make_prompts(1, 5), params, use_tqdm=False)
    assert "LOSSY" in caplog.text
    assert output.valid, "lossy is not invalid"


def test_nothing_else_is_marked(model: Path, draft: Path) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.8, detokenize=False)
    with open_llm(model, draft, "auto") as llm:
        (output,) = llm.generate(make_prompts(1, 5), params, use_tqdm=False)
    assert output.valid and output.outputs[0].valid
