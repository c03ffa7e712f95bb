"""What a config.json says of a model. The guarded bugs: windows counted wrongly, a scaled
context, defaults of another version."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config.resolve import check_heads
from foretoken.errors import (
    CheckpointError,
    ConfigError,
    ModelError,
    TokenizerError,
    UnsupportedModelError,
)
from foretoken.lab.plan.sizes import load_plan_model, read_config
from foretoken.proposers.heads.folder import read_head
from foretoken.shape import ModelShape
from foretoken.shape.families import families
from foretoken.shape.mixtures.families import MIXTURES
from foretoken.shape.multimodal import _TEXTS, find_multimodal
from foretoken.shape.transformers_config import _takes_attention
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.quantize.settings import QuantizeSettings, check_fits
from tests.golden.gguf_files import finish
from tests.marks import slow

BASE = {
    "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1000,
}  # fmt: skip


def read(folder: Path, **fields: Any) -> ModelShape:
    (folder / "config.json").write_text(json.dumps({**BASE, **fields}))
    return ModelShape.from_config(folder)


def test_windows_limit_what_is_read_not_what_is_kept(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="gemma3_text", head_dim=8, sliding_window=100)
    assert shape.windows == (100, 100, 100, 100, 100, None)
    assert shape.attended(60) == 6 * 60 * 4 * 8
    assert shape.attended(700) == (5 * 100 + 700) * 4 * 8
    assert shape.kv_bytes_per_token(2) == 2 * 6 * 2 * 8 * 2
    assert shape.kv_read_bytes(700, 2) == 2 * (5 * 100 + 700) * 2 * 8 * 2
    seen = shape.flops_per_token(700) - shape.flops_per_token(0)
    assert seen == 4 * (5 * 100 + 700) * 4 * 8


def test_without_windows_every_layer_reads_all(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="llama")
    assert shape.kv_read_bytes(700, 2) == 700 * shape.kv_bytes_per_token(2)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("mistral", {"sliding_window": 7}, (7,) * 6),
        ("mistral", {"sliding_window": None}, (None,) * 6),
        ("phi3", {"sliding_window": 7}, (7,) * 6),
        ("qwen2", {"sliding_window": 7}, (None,) * 6),
        (
            "qwen2",
            {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 4},
            (None, None, None, None, 7, 7),
        ),
        ("gemma2", {"sliding_window": 7}, (7, None, 7, None, 7, None)),
        (
            "gemma3_text",
            {"sliding_window": 7, "sliding_window_pattern": 3},
            (7, 7, None, 7, 7, None),
        ),
    ],
)
def test_windows(
    kind: str, fields: dict[str, Any], expected: tuple[int | None, ...], tmp_path: Path
) -> None:
    assert read(tmp_path, model_type=kind, **fields).windows == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({"rope_type": "default"}, 1000),
        ({"rope_type": "linear", "factor": 4.0}, 1000),
        ({"rope_type": "dynamic", "factor": 4.0}, 4000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 250}, 1000),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}, 4000),
    ],
)
def test_scaled_context(rope: dict[str, Any], expected: int, tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="llama", rope_parameters=rope)
    assert shape.max_position_embeddings == expected


def test_gemma_defaults(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="gemma2", sliding_window=7)
    assert (shape.head_dim, shape.tie_word_embeddings) == (256, True)
    assert (shape.embedding_scale, shape.attention_scale) == (8.0, 1 / 16)


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        ("smollm3", {}, (True, True, True, False, True, True)),
        ("smollm3", {"no_rope_layers": [0, 1, 0, 1, 0, 1]}, (False, True) * 3),
        ("smollm3", {"no_rope_layer_interval": 2}, (True, False) * 3),
        ("llama", {}, ()),
    ],
)
def test_layers_without_positions(
    kind: str, fields: dict[str, Any], expected: tuple[bool, ...], tmp_path: Path
) -> None:
    shape = read(tmp_path, model_type=kind, **fields)
    assert shape.turned == expected
    kinds = [shape.view(layer)[1].rope_type for layer in range(6)]
    assert kinds == ["default" if one else "none" for one in expected or (True,) * 6]


def test_positions_of_olmo3(tmp_path: Path) -> None:
    """Those that are scaled belong to the layers that see all."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 500}
    shape = read(tmp_path, model_type="olmo3", rope_scaling=yarn, rope_theta=7e5)
    views = [shape.view(layer) for layer in range(4)]
    assert [window for window, _ in views] == [4096, 4096, 4096, None]
    assert [rope.rope_type for _, rope in views] == ["default", "default", "default", "yarn"]
    assert {rope.theta for _, rope in views} == {7e5}
    assert (shape.max_position_embeddings, shape.rms_norm_eps) == (4000, 1e-5)


def test_queries_that_grow_count_positions(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="ministral3")
    assert shape.rope is not None and (shape.rope.query_growth, shape.rope.factor) == (0.1, 16.0)
    assert not shape.counts_distances
    assert read(tmp_path, model_type="smollm3").counts_distances


def test_norms_over_all_heads_are_not_shared_out(tmp_path: Path) -> None:
    shape = read(tmp_path, model_type="olmo2")
    check_heads("tensor_parallel_size", 1, shape)
    with pytest.raises(ConfigError, match="tensor_parallel_size: got 2; allowed: 1: norms"):
        check_heads("tensor_parallel_size", 2, shape)


# config.json of checkpoints that see: which decoder they hold. The guarded bugs: defaults that
# are not those of transformers' classes, fields of the wrong part, an id that is forgotten.
GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {"hidden_size": 1152},
}
"""As published: most of the decoder is left to the class."""


def test_a_published_sparse_config() -> None:
    shape = ModelShape.from_fields(GEMMA3_4B)
    assert (shape.model_type, shape.inside, shape.dtype) == ("gemma3_text", "gemma3", "bfloat16")
    assert (shape.vocab_size, shape.head_dim) == (262208, 256)
    assert (shape.num_attention_heads, shape.num_key_value_heads) == (8, 4)
    assert shape.tie_word_embeddings and shape.eos_token_ids == (1, 106)
    assert shape.windows[:7] == (1024,) * 5 + (None, 1024)
    assert shape.rope is not None and (shape.rope.theta, shape.rope.factor) == (1e6, 8.0)
    assert shape.local_rope is not None and shape.local_rope.theta == 1e4
    assert dict(shape.placeholders)["image_token_index"] == 262144
    assert shape.parameter_count() == pytest.approx(3.88e9, rel=0.01)
    planned = read_config("m", GEMMA3_4B, family="", tokenizer="")
    assert planned.dense_params + planned.table_params == shape.parameter_count()


def test_what_one_part_leaves_to_the_other() -> None:
    stored = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
    text = {**GEMMA3_4B["text_config"], "quantization_config": None, "eos_token_id": 7}
    inside = {**text, "quantization_config": stored, "torch_dtype": "float16"}
    for fields in (
        {"text_config": {**text, "dtype": None}, "quantization_config": stored},
        {"text_config": inside, "torch_dtype": None},
    ):
        shape = ModelShape.from_fields({**GEMMA3_4B, **fields})
        assert shape.stored is not None and shape.stored.method == "fp8"
        assert shape.dtype == ("float16" if "torch_dtype" in fields else "bfloat16")
        assert shape.eos_token_ids == (1, 7, 106)


@pytest.mark.slow
@pytest.mark.parametrize("kind", _TEXTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    usual = CONFIG_MAPPING[kind]()
    for name, value in _TEXTS[kind].defaults.items():
        if name == "rope_theta":
            assert usual.rope_parameters["rope_theta"] == value
        elif name != "sliding_window" or getattr(usual, "use_sliding_window", True):
            assert getattr(usual, name) == value, name


@pytest.mark.parametrize(
    ("fields", "error", "named"),
    [
        ({"text_config": None}, CheckpointError, "text_config"),
        ({"text_config": 5}, CheckpointError, "text_config"),
        ({"text_config": {"hidden_size": "x"}}, CheckpointError, "hidden_size"),
        ({"text_config": {"model_type": "llama"}}, UnsupportedModelError, "llama in gemma3"),
        ({"image_token_index": "x"}, CheckpointError, "image_token_index"),
    ],
)
def test_broken_configs(fields: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        ModelShape.from_fields({**GEMMA3_4B, **fields})


def test_quantizing_keeps_off() -> None:
    shape = ModelShape.from_fields(GEMMA3_4B)
    scheme = QuantizeSettings(scheme="int8").as_scheme
    with pytest.raises(UnsupportedModelError, match="got 'gemma3'; allowed: text decoders"):
        check_fits(shape, scheme)


def test_names() -> None:
    family = find_multimodal("qwen2_vl")
    assert family is not None
    stored = ["model.embed_tokens.weight", "model.visual.a", "visual.b", "lm_head.weight", "x"]
    assert sorted(family.names(stored)) == ["lm_head.weight", "model.embed_tokens.weight", "x"]
    twice = ["model.language_model.embed_tokens.weight", "model.embed_tokens.weight"]
    assert len(family.names(twice)) == 2, "none of them may be lost"


DENSE = {
    "vocab_size": 67, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gemma3n_text", "altup_num_inputs": 4, "intermediate_size": [80] * 2},
         "gemma3n_text, with several residual streams"),
        ({"model_type": "gemma3n_text", "hidden_size_per_layer_input": 8},
         "gemma3n_text, with embeddings per layer|several residual streams"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 1},
         "gemma3n_text, with layers that share keys|several residual streams"),
        ({"model_type": "lfm2", "full_attn_idxs": [1], "conv_L_cache": 3}, "lfm2, with convol"),
        ({"model_type": "gemma3n", "text_config": {}}, "gemma3n with text_config"),
    ],
)  # fmt: skip
def test_what_loading_would_refuse(fields: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**DENSE, **fields}))
    with pytest.raises(UnsupportedModelError, match=named):
        ModelShape.from_config(tmp_path)


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    said = "{% for part in one.content %}{{ part.text }}{% endfor %}"
    template = "{% for one in messages %}<{{ one.role }}>" + said + "{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    parts = [{"type": "text", "text": "hello"}]
    found = Tokenizer(tmp_path).chat_text([{"role": "user", "content": parts}])
    assert found == "<user>hello"


# Broken config.json files, of every family and beside every kind of weights: each is an error of
# our tree. The guarded bugs: a kind that a reader does not expect, sizes that take hours, depth.
WHOLE: dict[str, Any] = {
    "vocab_size": 67, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 128, "original_max_position_embeddings": None,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": None,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 2,
    "layer_types": None, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True,
    "hidden_act": "silu", "dtype": "float32", "eos_token_id": [1, 2], "rope_scaling": None,
    "text_config": None, "compression_config": None,
}  # fmt: skip
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
MIXED = {
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 24,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "decoder_sparse_step": 2,
    "mlp_only_layers": [1], "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
OF_MIXTURES = [family.model_type for family in MIXTURES]
CONFIGS: list[dict[str, Any]] = [
    *(
        WHOLE
        | (GELU if "gemma" in name else {})
        | (MIXED if name in OF_MIXTURES else {})
        | ({"n_group": 1} if name == "afmoe" else {})
        | {"model_type": name}
        for name in NAMES
    ),
    *(WHOLE | {"model_type": "llama", "rope_parameters": rope} for rope in (YARN, LLAMA3, LONG)),
    *(WHOLE | {"model_type": "qwen2", "quantization_config": stored} for stored in STORED),
    WHOLE | {"model_type": "smollm3", "no_rope_layers": [1, 0, 1, 0]},
    WHOLE | {"model_type": "ministral3", "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    WHOLE | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 7},
    WHOLE | {"model_type": "gemma3_text", "rope_parameters": {"full_attention": LLAMA3}} | GELU,
    {"model_type": "gemma3", "text_config": WHOLE | GELU, "image_token_index": 60, "dtype": None},
    WHOLE | {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [2, 3]}},
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
    config = {**WHOLE, "model_type": "llama", **fields}
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
    file.write_text(json.dumps({**WHOLE, "model_type": "llama"}))
    (tmp_path / "generation_config.json").write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        ModelShape.from_config(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(raw)
    with pytest.raises(TokenizerError):
        Tokenizer.of_folder(tmp_path)


@pytest.mark.parametrize("fields", [{"attention_bias": "x"}, {"id2label": 5}, {"dtype": "x"}])
def test_what_transformers_cannot_read(fields: dict[str, Any], tmp_path: Path) -> None:
    config = {**WHOLE, "model_type": "starcoder2", "eos_token_id": 1, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelShape.from_config(tmp_path)


def test_experts_as_a_list_are_a_mixture_of_experts(tmp_path: Path) -> None:
    config = {**WHOLE, "model_type": "ernie4_5", "moe_num_experts": [64, 64]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no mixture of experts"):
        ModelShape.from_config(tmp_path)


# Models that are not run are refused by what their config or file says, before anything is
# loaded. The guarded bug: `foretoken info` shows the memory of a model that no engine would take.
REFUSED = {
    "gemma3n_text": "several residual streams",
    "lfm2": "convolutions",
    "bloom": "no other attention than their own",
    "falcon": "no other attention than their own",
    "mpt": "no other attention than their own",
    "stablelm": "no other attention than their own",
    "xglm": "no other attention than their own",
    "mamba": "Mamba layers",
    "t5": "an encoder-decoder",
}
ARCHITECTURES = ("bloom", "falcon", "gemma3n", "lfm2", "llama4", "clip", "mamba", "no-such")


def config_of(kind: str, folder: Path) -> Path:
    """A folder with the config that transformers has for a kind of model."""
    AutoConfig.for_model(kind).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", REFUSED)
def test_configs(kind: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        ModelShape.from_config(config_of(kind, tmp_path))
    found = error.value
    assert found.field == "model_type" and REFUSED[kind] in str(found.given), found
    assert "llama, mistral" in found.allowed


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    writer.add_tensor("token_embd.weight", np.zeros((5, 8), np.float32))
    finish(writer)
    with pytest.raises(UnsupportedModelError) as error:
        ModelShape.from_config(path)
    found = error.value
    assert found.field == "model.gguf: general.architecture" and name in str(found.given), found
    assert ("the file of the language model" if name == "clip" else "llama, ") in found.allowed


def test_info_says_so(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["info", str(config_of("bloom", tmp_path))])
    assert found.exit_code == 3 and "bloom, whose modules know no other" in found.stderr


def _agrees(kind: str) -> bool:
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        made: Any = classes[type(AutoConfig.for_model(kind))]
    except (ImportError, KeyError):
        return True
    found: Any = made if isinstance(made, type) else made[0]
    return bool(found._supports_attention_backend) == _takes_attention(kind)


@pytest.mark.parametrize(
    "kinds",
    [("bloom", "gpt2", "cohere2", "granite"), slow(("falcon", "mpt", "gpt_neox", "opt", "phi"))],
)
def test_the_source_says_what_the_class_does(kinds: tuple[str, ...]) -> None:
    assert all(map(_agrees, kinds))
