"""Sampling parameters and the reader of settings: names, defaults, every bad value named."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch

from foretoken.config import EngineConfig
from foretoken.config.reader import (
    Allowed,
    KeyTable,
    at_least,
    between,
    check_fields,
    defaults_of,
    flat,
    grouped,
    keys_of,
    read,
    words,
)
from foretoken.errors import ConfigError, NotYetError, ParameterError
from foretoken.types import RequestMetrics, Resume, SamplingParams


def test_defaults_are_vllms() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.repetition_penalty) == (16, 0, 1.0)
    assert params.seed is None
    assert params.logprobs is None


BAD: dict[str, list[Any]] = {
    "n": [0, [10**5000]],  # the second has no repr
    "temperature": [-0.1, math.nan, math.inf, 10**400],
    "top_p": [0.0, 1.1, math.nan],
    "top_k": [-2, 1.5],
    "min_p": [-0.1],
    "repetition_penalty": [0.0],
    "presence_penalty": [3],
    "frequency_penalty": [math.nan],
    "max_tokens": [0],
    "min_tokens": [17],
    "logprobs": [-1, 21],
    "prompt_logprobs": [1.0],
    "stop": ["", [3], 5, {"a": 1}],
    "stop_token_ids": [[-1], 5],
    "bad_words": ["word", [""], 5],
    "allowed_token_ids": [[], 5, "5"],
    "logit_bias": [{1: math.nan}, {-1: 1.0}, {"\u00b2": 1.0}, {"9" * 5000: 1.0}, {1: 10**400}, [1]],
    "seed": [1.5],
    "speculation": ["off"],
    "prediction": [7, [1, -1], [0.5]],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
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
        queued_s=0, first_token_s=0, finished_s=0, num_preemptions=0, num_cached_tokens=0,
        drafted_per_step=(3, 3, 3), accepted_per_step=(3, 0, 1),
    )  # fmt: skip
    assert metrics.acceptance_histogram == (1, 1, 0, 1)
    assert metrics.acceptance_length == pytest.approx(1 + 4 / 3)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("enabled", 1), ("drafter", ""), ("num_speculative_tokens", -1),
        ("num_speculative_tokens", True), ("guard", -0.1), ("guard", True), ("guard", math.nan),
        ("guard", math.inf), ("tokens", 3),
    ],
)  # fmt: skip
def test_bad_speculation_names_the_key(key: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(speculation={key: value})
    assert caught.value.field == f"speculation.{key}"


NUMPY: list[tuple[str, Any, Any]] = [
    ("n", np.int64(2), 2),
    ("max_tokens", np.int32(5), 5),
    ("min_tokens", np.uint8(1), 1),
    ("top_k", torch.tensor(7), 7),
    ("logprobs", np.int64(3), 3),
    ("seed", np.uint64(2**64 - 1), 2**64 - 1),
    ("temperature", np.float32(0.5), 0.5),
    ("top_p", np.float16(0.5), 0.5),
    ("ignore_eos", np.bool_(True), True),
    ("stop_token_ids", np.arange(3), (0, 1, 2)),
    ("allowed_token_ids", [np.int64(4), torch.tensor(5)], (4, 5)),
    ("logit_bias", {np.int64(4): np.float32(0.5)}, {4: 0.5}),
    ("prediction", np.array([1, 2], dtype=np.uint16), (1, 2)),
]


@pytest.mark.parametrize(("name", "given", "kept"), NUMPY)
def test_numbers_of_other_packages_become_pythons(name: str, given: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == kept and type(found) is type(kept)
    if isinstance(found, tuple):
        assert {type(one) for one in found} == {type(one) for one in kept}


def test_numbers_of_other_packages_inside() -> None:
    policy = SamplingParams(
        speculation={"num_speculative_tokens": np.int64(3), "guard": np.float32(0.5)}
    ).own_policy
    assert policy is not None and type(policy.num_speculative_tokens) is int
    assert type(policy.guard) is float
    found = Resume.list_of([{"output_ids": np.arange(2), "ended": np.bool_(False)}])
    assert found == (Resume(output_ids=(0, 1)),)
    config = EngineConfig.from_kwargs(
        model="demo", max_num_seqs=np.int64(4), gpu_memory_utilization=np.float32(0.5)
    )
    assert type(config.max_num_seqs) is int and config.gpu_memory_utilization == 0.5


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("n", np.bool_(True)),
        ("n", np.float64(2)),
        ("max_tokens", torch.tensor(True)),
        ("stop_token_ids", np.array([True])),
        ("stop_token_ids", np.ones((2, 2), dtype=int)),
        ("stop_token_ids", np.array(3)),
        ("allowed_token_ids", [np.float32(3)]),
        ("prediction", np.array(3)),
        ("logit_bias", {np.float32(1): 0.5}),
        ("temperature", np.float32("nan")),
        ("temperature", np.array([0.5])),
    ],
)
def test_truth_values_fractions_and_arrays_are_no_integers(name: str, given: Any) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{name: given})
    assert caught.value.field == name


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    until: Annotated[float, between(0.0, 1.0)]
    rows: Literal["text", "answers"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    low: Annotated[int, at_least(1)] = 1
    high: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    steps: Annotated[int, at_least(1)] | None = None
    rate: float = 0.5
    colour: Colour = Colour.RED
    stages: tuple[Stage, ...] = ()
    shares: dict[str, float] | None = None
    size: tuple[int, int] = (1, 1)
    rule: Annotated[str, words("strict", "loose", later=("magic",))] = "strict"
    seed: int | str = 0
    even: Annotated[int, Allowed("an even number", lambda count: count % 2 == 0)] = 0
    limits: Limits = flat(Limits)

    def __post_init__(self) -> None:
        check_fields(self, "run.")


def test_plain_values_become_settings() -> None:
    found = read(
        Run,
        {
            "name": "x",
            "rate": 1,
            "colour": "blue",
            "stages": [{"until": 1}, {"until": 0.5, "rows": "answers"}],
            "shares": {"a": 1},
            "size": [2, 3],
            "seed": "now",
        },
        "run",
    )
    assert found.rate == 1.0 and isinstance(found.rate, float) and found.colour is Colour.BLUE
    assert [stage.until for stage in found.stages] == [1.0, 0.5]
    assert (found.shares, found.size, found.seed) == ({"a": 1.0}, (2, 3), "now")


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"naem": "x"}, "run.naem", "did you mean 'name'?"),
        ({}, "run.name", "text; it has no default"),
        ({"name": 3}, "run.name", "text"),
        ({"name": "x", "steps": 0}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "steps": True}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "steps": 2.0}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "rate": "fast"}, "run.rate", "a number"),
        ({"name": "x", "rate": None}, "run.rate", "a number"),
        ({"name": "x", "colour": "rad"}, "run.colour", "did you mean 'red'?"),
        ({"name": "x", "stages": {}}, "run.stages", "a list"),
        ({"name": "x", "stages": [{"until": 2}]}, "run.stages[0].until", "a number from 0 to 1"),
        ({"name": "x", "stages": [{"until": 1, "rows": "txt"}]}, "run.stages[0].rows", "'text'?"),
        ({"name": "x", "shares": {"a": "b"}}, "run.shares.a", "a number"),
        ({"name": "x", "size": [1]}, "run.size", "2 values"),
        ({"name": "x", "rule": "lose"}, "run.rule", "did you mean 'loose'?"),
        ({"name": "x", "seed": 1.5}, "run.seed", "an integer or text"),
        ({"name": "x", "even": 3}, "run.even", "an even number"),
        ([], "run", "a mapping"),
    ],
)
def test_mistakes_name_field_and_what_is_allowed(given: Any, field: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Run, given, "run")
    assert caught.value.field == field
    assert allowed in str(caught.value)


def test_words_whose_part_is_not_built() -> None:
    with pytest.raises(NotYetError, match="'magic' is not yet built"):
        Run(name="x", rule="magic")


def test_null_stands_for_no_number_only_where_asked() -> None:
    assert math.isnan(read(Run, {"name": "x", "rate": None}, "run", null_is_nan=True).rate)


def test_settings_that_belong_together_share_a_dictionary() -> None:
    assert keys_of(Run)[-2:] == ("low", "high")
    assert defaults_of(Run)["high"] == 9 and "name" not in defaults_of(Run)
    for found in (
        Run(**grouped(Run, {"name": "x", "high": 3})),
        read(Run, {"name": "x", "high": 3}, "run"),
    ):
        assert found.limits == Limits(high=3)


def test_a_table_of_keys() -> None:
    table = KeyTable(where="run", neutral={"lora": (False,)}, removed={"swap": "leave it out"})
    assert table.accept({"max-steps": 3, "lora": False}, ["max_steps"]) == {"max_steps": 3}
    with pytest.raises(NotYetError, match="not yet built"):
        table.accept({"lora": 0}, ["max_steps"])
    with pytest.raises(ConfigError, match="leave it out"):
        table.accept({"swap": 1}, ["max_steps"])
    with pytest.raises(ConfigError, match="did you mean 'max_steps'"):
        table.accept({"max_step": 1}, ["max_steps"])
