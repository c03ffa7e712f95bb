"""Sizes of models and devices: published totals, and agreement with the engine's own arithmetic."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.checkpoint import packaged_model
from foretoken.errors import CheckpointError, ConfigError, ModelNotFoundError
from foretoken.lab.plan.bits import find_quantization, kv_element_bytes
from foretoken.lab.plan.devices import find_device, known_devices
from foretoken.lab.plan.memory_plan import kv_per_token, weight_bytes
from foretoken.lab.plan.sizes import known_models, load_plan_model, read_config
from foretoken.shape import ModelShape
from foretoken.shape.families import families

PUBLISHED = {  # billions of weights, from the models' cards
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21, "llama-2-13b": 13.02, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "deepseek-v3": 671.0,
}  # fmt: skip
ACTIVE = {"gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1, "deepseek-v3": 36.7, "qwen3-235b-a22b": 21.6}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_weights_match_the_cards(name: str, billions: float) -> None:
    assert load_plan_model(name, "target").params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_weights_of_experts(name: str, billions: float) -> None:
    assert load_plan_model(name, "target").active_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_keys_and_values_per_token() -> None:
    big, small = load_plan_model("llama-3.1-70b", "t"), load_plan_model("llama-3.1-8b", "t")
    assert kv_per_token(big, 2, 4096) == 320 * 1024
    assert kv_per_token(small, 2, 4096) == 128 * 1024
    latent = load_plan_model("deepseek-v3", "t")
    assert kv_per_token(latent, 2, 4096) == 61 * (512 + 64) * 2


def test_windows_bound_what_a_token_costs() -> None:
    model = load_plan_model("gpt-oss-120b", "t")
    short, long = kv_per_token(model, 2, 128), kv_per_token(model, 2, 131072)
    assert short == 2 * 36 * 2 * 8 * 64
    assert long == pytest.approx(short / 2, rel=0.01)


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_agrees_with_the_engine(name: str) -> None:
    shape = ModelShape.from_config(packaged_model(name))
    model = load_plan_model(name, "t")
    assert model.params == shape.parameter_count()
    assert model.kv_elements * 2 == shape.kv_bytes_per_token(2)
    assert model.flops_per_token(512) == shape.flops_per_token(512)
    assert model.tokenizer != ""


SMALL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    {"model_type": "mistral", "sliding_window": 100},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2"},
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 100,
        "max_window_layers": 4,
    },
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "head_dim": 40, "tie_word_embeddings": True},
    {"model_type": "phi3", "sliding_window": 100},
    {"model_type": "ministral3"},
    {"model_type": "smollm3"},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 100},
    {"model_type": "olmo2", "attention_bias": True},
    {"model_type": "olmo3", "sliding_window": 100},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "sliding_window": 100},
    {"model_type": "gemma3_text", "sliding_window": 100, "head_dim": 8},
]


def test_every_family_of_the_engine_is_compared() -> None:
    assert {str(config["model_type"]) for config in FAMILIES} == {
        family.model_type for family in families()
    }


@pytest.mark.parametrize("config", FAMILIES, ids=str)
def test_work_and_sizes_agree_with_the_engine(config: dict[str, Any]) -> None:
    """Heads wider than hidden_size, windows, biases, norms and defaults that config.json omits."""
    config = {**SMALL, **config}
    shape = ModelShape.from_fields(config)
    model = read_config("m", config, family="", tokenizer="")
    for context in (1, 60, 700, 4096):
        assert model.flops_per_token(context) == shape.flops_per_token(context)
    assert model.params == shape.parameter_count()
    assert (model.kv_elements + model.window_elements) * 2 == shape.kv_bytes_per_token(2)
    assert model.matrix_outputs == shape.weight_counts().outputs


def test_attention_of_wide_heads_is_counted() -> None:
    """16 heads of 128 over hidden_size 1024: hidden_size alone would give 1.66 GFLOP."""
    model = load_plan_model("qwen3-0.6b", "t")
    assert model.flops_per_token(4096) / 1e9 == pytest.approx(2.13, abs=0.005)


def test_experts_and_latent_attention_count_what_a_token_uses() -> None:
    windowed, latent = load_plan_model("gpt-oss-120b", "t"), load_plan_model("deepseek-v3", "t")
    weights = 2 * windowed.active_params
    seen = 18 * 4096 + 18 * 128
    assert windowed.flops_per_token(4096) == weights + 4 * seen * 64 * 64
    of_latent = latent.flops_per_token(4096) - 2 * latent.active_params
    assert of_latent == 2 * 61 * 4096 * 128 * (128 + 64 + 128)


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    config = known_models()["Qwen/Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file = load_plan_model(str(tmp_path / "config.json"), "t")
    assert by_file.params == load_plan_model(str(tmp_path), "t").params
    assert by_file.params == load_plan_model("Qwen/Qwen3-8B", "t").params


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    with pytest.raises(CheckpointError, match=r"num_hidden_layers|vocab_size"):
        load_plan_model(str(tmp_path), "t")


def test_unknown_features_become_notes() -> None:
    config = dict(known_models()["Qwen/Qwen3-8B"]["config"])
    config["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    model = read_config("hybrid", config, family="", tokenizer="")
    assert model.kv_elements == 9 * 2 * 8 * 128
    assert any("recurrent" in note for note in model.approximations)


def test_an_unreachable_name_lists_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"llama-3\.1-70b"):
        load_plan_model("nobody/nothing", "plan.target")


def test_stored_bytes_count_scales_and_wide_tables() -> None:
    model = load_plan_model("llama-3.1-70b", "t")
    four_bit = weight_bytes(model, find_quantization("int4", "q"))
    assert four_bit > 0.5 * model.params * 1.03
    assert four_bit == pytest.approx(39.8e9, rel=0.01), "the size of published AWQ files"
    assert weight_bytes(model, find_quantization("bfloat16", "q")) == 2 * model.params


@pytest.mark.parametrize("name", ["int3", ""])
def test_unknown_quantizations_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match="int8"):
        find_quantization(name, "quantization")
    with pytest.raises(ConfigError, match="fp8"):
        kv_element_bytes(name, "kv")


def test_every_device_is_plausible_and_sourced() -> None:
    for name, device in known_devices().items():
        assert device.source, name
        assert 0.8 < device.memory_bytes / device.advertised_bytes < 1.1, name
        balance = device.flops_for("bf16") / device.bandwidth
        assert 20 < balance < 800, (name, balance)
        assert device.flops_for("fp8") >= device.flops_for("bf16"), name


def test_devices_are_found_by_unique_parts() -> None:
    assert find_device("H200").name == "h200"
    assert find_device("4090").name == "rtx-4090"
    assert find_device("this").memory_bytes > 0
    with pytest.raises(ConfigError, match="h100-sxm"):
        find_device("h1")
