"""Sampling parameters: vLLM's names and defaults, every bad value named."""

import math

import pytest

from foretoken.errors import ParameterError
from foretoken.types import RequestMetrics, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert params.seed is None
    assert params.logprobs is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3),
        ("frequency_penalty", math.nan),
        ("max_tokens", 0),
        ("min_tokens", 17),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 1.0),
        ("stop", ""),
        ("stop", [3]),
        ("stop_token_ids", [-1]),
        ("bad_words", "word"),
        ("bad_words", [""]),
        ("allowed_token_ids", []),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"\u00b2": 1.0}),
        ("logit_bias", {"9" * 5000: 1.0}),
        ("logit_bias", {1: 10**400}),
        ("logit_bias", [1]),
        ("temperature", 10**400),
        ("n", [10**5000]),  # has no repr
        ("stop", 5),
        ("stop", {"a": 1}),
        ("bad_words", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("allowed_token_ids", "5"),
        ("seed", 1.5),
        ("speculation", "off"),
        ("prediction", 7),
        ("prediction", [1, -1]),
        ("prediction", [0.5]),
    ],
)
def test_bad_values_name_the_field(name: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert caught.value.allowed


def test_sequences_become_tuples_and_biases_are_clamped() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[1, 2], logit_bias={"4": 300.0})  # type: ignore[dict-item]
    assert params.stop == ("end",)
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {4: 100.0}


def test_acceptance_of_a_request() -> None:
    metrics = RequestMetrics(
        queued_s=0,
        first_token_s=0,
        finished_s=0,
        num_preemptions=0,
        num_cached_tokens=0,
        drafted_per_step=(3, 3, 3),
        accepted_per_step=(3, 0, 1),
    )
    assert metrics.acceptance_histogram == (1, 1, 0, 1)
    assert metrics.acceptance_length == pytest.approx(1 + 4 / 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1),
        ("drafter", ""),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", True),
        ("guard", -0.1),
        ("guard", True),
        ("guard", math.nan),
        ("guard", math.inf),
        ("tokens", 3),
    ],
)
def test_bad_speculation_names_the_key(key: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(speculation={key: value})
    assert caught.value.field == f"speculation.{key}"
