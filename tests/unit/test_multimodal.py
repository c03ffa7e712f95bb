"""config.json of checkpoints that see: which decoder they hold. The guarded bugs: defaults that are
not those of transformers' classes, fields of the wrong part, an id that is forgotten."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.lab.plan.sizes import read_config
from foretoken.shape import ModelShape
from foretoken.shape.multimodal import _TEXTS, find_multimodal
from foretoken.text.tokenizer import Tokenizer
from foretoken.training.quantize.settings import QuantizeSettings, check_fits

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
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "gemma3n_text", "altup_num_inputs": 4, "intermediate_size": [80] * 2},
         "gemma3n_text, with several residual streams"),
        ({"model_type": "gemma4_text", "hidden_size_per_layer_input": 8},
         "gemma4_text, with embeddings per layer"),
        ({"model_type": "gemma4_text", "num_kv_shared_layers": 1},
         "gemma4_text, with layers that share keys"),
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
