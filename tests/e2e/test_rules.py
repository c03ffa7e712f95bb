"""Every rule through the whole engine: exact where it says so, marked where it is not."""

import logging
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, RequestOutput, SamplingParams
from foretoken.errors import ParameterError
from foretoken.testing import write_tiny_llama
from foretoken.types import TokenSource
from tests.e2e.lossless import (
    EXACT,
    VOCAB,
    asking,
    counted,
    drawn,
    make_prompts,
    open_exact,
)
from tests.property.exact import assert_alike

run_ten, without_drafts = asking(10, 32)


def open_llm(model: Path, draft: Path, rule: str, **others: Any) -> LLM:
    config = {"model": str(draft), "num_speculative_tokens": 4, "rejection_sample_method": rule}
    return LLM(str(model), speculative_config={**config, **others}, **EXACT)


@pytest.mark.parametrize("rule", ["matching", "standard", "block", "typical"])
def test_greedy_requests_are_identical_under_every_rule(
    rule: str, model: Path, draft: Path, without_drafts: Any
) -> None:
    with open_llm(model, draft, rule) as llm:
        for name in ("greedy", "greedy penalties"):
            assert run_ten(llm, name) == without_drafts(name)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_drawn_tokens_have_the_plain_distribution(
    rule: str, model: Path, tmp_path: Path, drawn_plain: Any
) -> None:
    """Four tokens, without and with speculation: a two-sample chi-square of what came out."""
    draft = write_tiny_llama(tmp_path, seed=1, scale=2.4)
    config = {"model": str(draft), "rejection_sample_method": rule}
    with open_exact(model, config, seed=3) as llm:
        assert_alike(drawn(llm, 4), drawn_plain(4), least_freedom=3)
        assert counted(llm, "foretoken:acceptance_length") > 1.1


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


SAMPLED: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 0.8, "seed": 4}]
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}


def several(draft: Path) -> dict[str, Any]:
    model = {"method": "draft_model", "model": str(draft), "name": "small"}
    return {"drafters": [NGRAM, {**model, "num_speculative_tokens": 3}]}


def run(llm: LLM, each: list[dict[str, Any]]) -> list[RequestOutput]:
    params = [SamplingParams(max_tokens=40, detokenize=False, **one) for one in each]
    return llm.generate(make_prompts(len(each), 4), params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [out.token_ids for request in outputs for out in request.outputs]


@pytest.fixture(scope="module")
def plain(model: Path) -> list[RequestOutput]:
    """Plain decoding of twelve requests, greedy and seeded in turn."""
    with LLM(str(model), **EXACT) as llm:
        return run(llm, [SAMPLED[i % 2] for i in range(12)])


def policies(plain: list[RequestOutput]) -> list[dict[str, Any]]:
    """Every kind of policy, over and over, predictions right, spoiled and foreign among them."""
    kinds: list[dict[str, Any]] = []
    for index, request in enumerate(plain):
        known = list(request.outputs[0].token_ids)
        spoiled = [(t + 1) % VOCAB if i % 7 == 3 else t for i, t in enumerate(known)]
        wishes: list[dict[str, Any]] = [
            {},
            {"speculation": {"enabled": False}},
            {"speculation": {"drafter": "small"}, "prediction": spoiled},
            {"speculation": {"drafter": "ngram", "num_speculative_tokens": 2}},
            {"prediction": known},
            {"prediction": list(range(50)), "speculation": {"num_speculative_tokens": 1}},
        ]
        kinds.append({**SAMPLED[index % 2], **wishes[index // 2 % len(wishes)]})
    return kinds


def test_mixed_policies_in_one_batch(model: Path, draft: Path, plain: list[RequestOutput]) -> None:
    """Identical tokens, and each request served by those it allows only."""
    with LLM(str(model), speculative_config=several(draft), **EXACT) as llm:
        found = run(llm, policies(plain))
    assert tokens(found) == tokens(plain)
    used = [set(request.outputs[0].metrics.drafter_per_step) for request in found]  # type: ignore[union-attr]
    assert used[2] == used[3] == set()
    assert used[4] <= {"prediction", "small"} and "prediction" in used[5]
    assert used[6] | used[7] == {"ngram"}
    assert used[8] == used[9] == {"prediction"}
    assert used[0] | used[1] == {"ngram", "small"}
    lengths = found[6].outputs[0].metrics
    assert lengths is not None and max(lengths.drafted_per_step) <= 2


def test_a_prediction_needs_no_drafter(model: Path, plain: list[RequestOutput]) -> None:
    """Without any speculative_config, and with every accepted token named after it."""
    with LLM(str(model), **EXACT) as llm:
        wishes = [{**SAMPLED[i % 2], "prediction": list(o.outputs[0].token_ids)}
                  for i, o in enumerate(plain)]  # fmt: skip
        found = run(llm, wishes)
        assert tokens(found) == tokens(plain)
        for request in found:
            out = request.outputs[0]
            assert out.metrics is not None and out.metrics.acceptance_length > 8
            for source, drafter in zip(out.sources, out.drafters, strict=True):
                accepted = source is TokenSource.ACCEPTED
                assert drafter == ("prediction" if accepted else None)


def test_predictions_may_be_text() -> None:
    """The text of the output itself is accepted nearly whole."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 32}
    with LLM("demo") as llm:
        [known] = llm.generate("def add(a, b):", SamplingParams(**params), use_tqdm=False)
        text = known.outputs[0].text
        guess = SamplingParams(prediction=text, **params)
        [found] = llm.generate("def add(a, b):", guess, use_tqdm=False)
    assert found.outputs[0].token_ids == known.outputs[0].token_ids
    assert found.outputs[0].metrics is not None
    assert found.outputs[0].metrics.acceptance_length > 4


@pytest.mark.parametrize(
    ("wishes", "field"),
    [
        ({"speculation": {"drafter": "medium"}}, "speculation.drafter"),
        ({"speculation": {"num_speculative_tokens": 5}}, "speculation.num_speculative_tokens"),
        ({"prediction": [3, VOCAB]}, "prediction"),
        ({"prediction": "a text"}, "prediction"),
    ],
)
def test_wishes_that_cannot_be_met(
    wishes: dict[str, Any], field: str, model: Path, draft: Path
) -> None:
    with (
        LLM(str(model), speculative_config=several(draft), **EXACT) as llm,
        pytest.raises(ParameterError) as caught,
    ):
        run(llm, [wishes])
    assert caught.value.field == field


@pytest.mark.parametrize("least", [0, 2])
def test_a_confident_draft_stops_before_tokens_not_because_of_them(
    least: int, model: Path, draft: Path, plain: list[RequestOutput]
) -> None:
    """Lengths vary between the least and the most; tokens do not change."""
    config = {"model": str(draft), "num_speculative_tokens": 6, "draft_confidence_threshold": 0.4}
    config["min_speculative_tokens"] = least
    with LLM(str(model), speculative_config=config, **EXACT) as llm:
        found = run(llm, [SAMPLED[i % 2] for i in range(12)])
    assert tokens(found) == tokens(plain)
    metrics = [request.outputs[0].metrics for request in found]
    lengths = {n for m in metrics if m is not None for n in m.drafted_per_step}
    assert len(lengths) > 2 and max(lengths) <= 6 and min(lengths) >= max(least, 1)
