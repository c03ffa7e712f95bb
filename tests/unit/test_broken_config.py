"""Broken config.json files, of every family and beside every kind of weights: each is an error of
our tree. The guarded bugs: a kind that a reader does not expect, sizes that take hours, depth."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import CheckpointError, ModelError, TokenizerError
from foretoken.lab.plan.sizes import load_plan_model, read_config
from foretoken.proposers.heads.folder import read_head
from foretoken.shape import ModelShape
from foretoken.shape.families import families
from foretoken.text.tokenizer import Tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "original_max_position_embeddings": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "partial_rotary_factor": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "layer_types": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "dtype": "float32",
    "eos_token_id": [1, 2],
    "rope_scaling": None,
    "text_config": None,
    "compression_config": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.4, "truncate": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
    "input_activations": None,
}
STORED: list[dict[str, Any]] = [
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    | {"config_groups": {"group_0": GROUP}, "sparsity_config": {}, "kv_cache_scheme": None},
]
ACT = "gelu_pytorch_tanh"
GELU = {"hidden_activation": ACT, "hidden_act": ACT, "sliding_window": 9}
NAMES = [family.model_type for family in families()]
CONFIGS: list[dict[str, Any]] = [
    *(BASE | (GELU if "gemma" in name else {}) | {"model_type": name} for name in NAMES),
    *(BASE | {"model_type": "llama", "rope_parameters": rope} for rope in (YARN, LLAMA3, LONG)),
    *(BASE | {"model_type": "qwen2", "quantization_config": stored} for stored in STORED),
    BASE | {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0]},
    BASE | {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    BASE | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7},
    BASE | {"model_type": "gemma3_text", "rope_parameters": {"full_attention": LLAMA3}} | GELU,
    {"model_type": "gemma3", "text_config": BASE | GELU, "image_token_index": 60, "dtype": None},
    BASE | {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}},
]
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 5, 10**7, 2**31, 10**12, 10**30, -(10**30)),
    *(2.5, 1e308, float("nan"), float("inf"), "", "x", "8"),
    *([], [None], ["x"], [1, 2], [[]], [{}], {}, {"a": 1}, {"factor": "x"}, {"x": {}}),
]


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, of lists the first two."""
    inside: list[tuple[Any, Any]] = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        inside = list(enumerate(value))[:2]
    for key, one in inside:
        yield (*at, key)
        yield from places(one, (*at, key))


def changed(config: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    found = copy.deepcopy(config)
    inner: Any = found
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return found


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_a_wrong_kind_anywhere_is_our_error_or_read(number: int) -> None:
    every = [(at, value) for at in places(CONFIGS[number]) for value in WRONG]
    read = 0
    for at, value in random.Random(number).sample(every, 250):
        config = changed(CONFIGS[number], at, value)
        try:
            read += ModelShape.from_fields(config).num_hidden_layers > 0
        except ModelError as error:
            assert len(str(error)) < 2000
        try:
            read_config("m", config, family="", tokenizer="")
        except ModelError as error:
            assert len(str(error)) < 2000
    assert 0 < read < 250


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rope_scaling": 5}, "rope_scaling"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "rope_scaling factor"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling rope_type"),
        ({"eos_token_id": {}}, "eos_token_id"),
        ({"eos_token_id": [[1]]}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"model_type": []}, "model_type"),
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"quantization_config": []}, "quantization_config"),
        ({"quantization_config": {"quant_method": []}}, "quant_method"),
        ({"quantization_config": {"config_groups": {"a": 5}}}, "config_groups a"),
        ({"dtype": ["float32"]}, "dtype"),
    ],
)
def test_the_field_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    config = {**BASE, "model_type": "llama", **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json .*{named}: got"):
        ModelShape.from_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"eagle_config": 5}, "eagle_config"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "eagle_aux_hidden_state_layer_ids"),
        (
            {"transformer_layer_config": {"rope_scaling": 5}},
            "transformer_layer_config rope_scaling",
        ),
        ({"dflash_config": []}, "dflash_config"),
        ({"mask_token_id": "x"}, "mask_token_id"),
        ({"architectures": 5}, "architectures"),
    ],
)
def test_the_field_of_a_head_is_named(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(CheckpointError, match=rf"config\.json {named}: got"):
        read_head(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "[1]", "\udcff", "null"])
def test_what_is_no_object(text: str, tmp_path: Path) -> None:
    raw = text.encode(errors="surrogateescape")
    file = tmp_path / "config.json"
    file.write_bytes(raw)
    for read in (ModelShape.from_config, read_head, lambda at: load_plan_model(str(at), "model")):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            read(tmp_path)
    file.write_text(json.dumps({**BASE, "model_type": "llama"}))
    (tmp_path / "generation_config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelShape.from_config(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(raw)
    with pytest.raises(TokenizerError):
        Tokenizer.of_folder(tmp_path)


@pytest.mark.parametrize("fields", [{"attention_bias": "x"}, {"id2label": 5}, {"dtype": "x"}])
def test_what_transformers_cannot_read(fields: dict[str, Any], tmp_path: Path) -> None:
    config = {**BASE, "model_type": "starcoder2", "eos_token_id": 1, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelShape.from_config(tmp_path)


def test_experts_as_a_list_are_a_mixture_of_experts(tmp_path: Path) -> None:
    config = {**BASE, "model_type": "ernie4_5", "moe_num_experts": [64, 64]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no mixture of experts"):
        ModelShape.from_config(tmp_path)
