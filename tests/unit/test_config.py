"""What a user may write in `LLM(...)` and `speculative_config`, and what each mistake answers."""

from typing import Any

import pytest

from foretoken.config import DrafterConfig, EngineConfig, SpeculativeConfig
from foretoken.errors import ConfigError, NotYetError


def one(given: dict[str, Any]) -> DrafterConfig:
    [drafter] = SpeculativeConfig.from_dict(given).drafters
    return drafter


def test_vllm_arguments_are_taken() -> None:
    config = EngineConfig.from_kwargs(
        model="demo",
        dtype="bfloat16",
        max_model_len=512,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        trust_remote_code=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 3


def test_unknown_key_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'") as caught:
        EngineConfig.from_kwargs(model="demo", max_num_seq=4)
    assert caught.value.field == "LLM.max_num_seq"


def test_kv_cache_dtype_of_target_and_draft() -> None:
    draft = {"model": "demo-draft", "kv_cache_dtype": "int8"}
    config = EngineConfig.from_kwargs(
        model="demo", kv_cache_dtype="int8", speculative_config={**draft, "kv_cache_dtype": None}
    )
    assert config.kv_cache_dtype == "int8" and config.speculative_config is not None
    assert config.speculative_config.drafters[0].kv_cache_dtype == "auto"
    for method, model in (("draft_model", "demo-draft"), ("eagle3", "demo-eagle3")):
        given = {**draft, "method": method, "model": model}
        assert one(given).kv_cache_dtype == "int8"
    with pytest.raises(NotYetError, match="auto, int8"):
        SpeculativeConfig.from_dict({**draft, "kv_cache_dtype": "fp8"})
    with pytest.raises(ConfigError, match="auto, int8"):
        EngineConfig.from_kwargs(model="demo", kv_cache_dtype="int7")


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "mlp", "model": "demo-mlp"},
        {"method": "medusa", "model": "demo-medusa"},
        {"method": "custom_class", "model": "a.b.C"},
    ],
    ids=str,
)
def test_no_keys_of_its_own_no_type_of_keys(given: dict[str, str]) -> None:
    SpeculativeConfig.from_dict({**given, "kv_cache_dtype": "auto"})
    with pytest.raises(ConfigError, match="keeps no keys and values of its own"):
        SpeculativeConfig.from_dict({**given, "kv_cache_dtype": "int8"})
    with pytest.raises(ConfigError, match="goes inside one of the drafters"):
        SpeculativeConfig.from_dict({"drafters": [given], "kv_cache_dtype": "int8"})


def test_activations_of_target_and_draft() -> None:
    draft = {"model": "demo-draft", "activations": "int16"}
    config = EngineConfig.from_kwargs(
        model="demo", quantization="int4", activations="int8", speculative_config=draft
    )
    assert config.numbers.x_bits == 8 and config.numbers.x_bits_asked_by == "activations"
    assert one(draft).numbers.x_bits == 16
    assert EngineConfig.from_kwargs(model="demo").numbers.x_bits == 16
    rounded = EngineConfig.from_kwargs(model="demo", quantization="int8")
    assert rounded.numbers.x_bits == 16, "a target's tokens are nobody's to check"
    for method in ("draft_model", "eagle3"):
        given = {"method": method, "model": "demo-draft", "quantization": "int8"}
        assert one(given).numbers.x_bits == (8 if method == "draft_model" else 16)
        assert one(given).numbers.x_bits_asked_by is None
        assert one({**given, "activations": "int16"}).numbers.x_bits == 16
    assert EngineConfig.from_kwargs(model="demo").numbers.x_bits_asked_by is None
    head = {"method": "eagle3", "model": "demo-eagle3", "activations": "int8"}
    assert one({**head, "quantization": "int8"}).numbers.x_bits == 8
    with pytest.raises(ConfigError, match="beside quantization"):
        one(head)
    with pytest.raises(ConfigError, match="ngram has no weights"):
        one({"method": "ngram", "activations": "int8"})
    with pytest.raises(ConfigError, match="auto, int16, int8"):
        EngineConfig.from_kwargs(model="demo", activations="int4")


def test_a_part_not_built_says_so() -> None:
    with pytest.raises(NotYetError, match="not yet built"):
        EngineConfig.from_kwargs(model="demo", kv_cache_dtype="fp8")
    with pytest.raises(NotYetError, match="mtp"):
        SpeculativeConfig.from_dict({"method": "mtp", "model": "x"})
    with pytest.raises(NotYetError, match="fly"):
        SpeculativeConfig.from_dict({"method": "ngram", "rejection_sample_method": "fly"})
    with pytest.raises(ConfigError, match="only draft_model, parallel, eagle3"):
        SpeculativeConfig.from_dict({"method": "ngram", "parallel_drafting": True})


def test_neutral_values_of_parts_not_built_are_taken() -> None:
    given = {"method": "ngram", "parallel_drafting": False, "suffix_decoding_max_tree_depth": 24}
    assert one(given).method == "ngram"


def test_removed_keys_name_their_successor() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        SpeculativeConfig.from_dict({"method": "ngram", "synthetic_acceptance_rate": 0.4})
    with pytest.raises(ConfigError, match="leave it out"):
        EngineConfig.from_kwargs(model="demo", swap_space=4)
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        SpeculativeConfig.from_dict({"method": "ngram", "tensor_parallel_size": 1})


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"method": "ngram"}, "1: ngram runs in one process"),
        ({"model": "demo-eagle3"}, "1: eagle3 runs in one process"),
        ({"model": "demo-draft", "ranks": 3}, "1 or 2, the tensor_parallel_size"),
    ],
)
def test_a_drafter_runs_in_one_process_or_in_those_of_the_target(
    given: dict[str, Any], allowed: str
) -> None:
    ranks = given.pop("ranks", 2)
    spec = {**given, "draft_tensor_parallel_size": ranks}
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size.*" + allowed):
        EngineConfig.from_kwargs(model="demo", tensor_parallel_size=2, speculative_config=spec)
    for fine in (None, 1):
        spec = {**given, "draft_tensor_parallel_size": fine}
        EngineConfig.from_kwargs(model="demo", tensor_parallel_size=2, speculative_config=spec)


def test_method_is_inferred() -> None:
    assert one({"model": "ngram"}).method == "ngram"
    assert one({"model": "demo-draft"}).method == "draft_model"
    with pytest.raises(ConfigError, match="method"):
        SpeculativeConfig.from_dict({"num_speculative_tokens": 3})


def test_one_lookup_bound_moves_the_other() -> None:
    own = one({"method": "ngram", "prompt_lookup_min": 9}).own
    assert (own.prompt_lookup_min, own.prompt_lookup_max) == (9, 9)
    own = one({"method": "ngram", "prompt_lookup_max": 1}).own
    assert (own.prompt_lookup_min, own.prompt_lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 2.5),
        ("num_speculative_tokens", True),
        ("prompt_lookup_min", 0),
        ("prompt_lookup_min", 6),
        ("draft_sample_method", "best"),
        ("rejection_sample_method", "strictly"),
        ("max_model_len", 0),
        ("model", "demo-draft"),
    ],
)
def test_speculative_values_out_of_range(key: str, value: object) -> None:
    given = {"method": "ngram", "prompt_lookup_max": 5, key: value}
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{key}"
    assert caught.value.given == value


def test_a_draft_model_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        SpeculativeConfig.from_dict({"method": "draft_model"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "fp8"),
        ("device", "mps"),
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("block_size", 12),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("batch_invariant", "yes"),
        ("tensor_parallel_size", 0),
        ("seed", "x"),
        ("speculative_config", "ngram"),
    ],
)
def test_engine_values_out_of_range(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{"model": "demo", key: value})
    assert caught.value.field == key
    assert caught.value.given == value
