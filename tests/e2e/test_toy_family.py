"""A model family that this file alone knows: one record, and everything runs it.

The guarded bug: a table somewhere else that has to be told of a new family too.
"""

import ast
import json
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from foretoken import LLM, ModelFamily, register_family
from foretoken.cli.app import app
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.lab.plan.sizes import load_plan_model
from foretoken.shape import ModelShape, RopeShape, families
from foretoken.shape.fields import Config, positive, size
from foretoken.testing import write_tiny_llama
from tests.drafters import TreeProposer
from tests.e2e.lossless import PRESSURES, VOCAB, generate, make_prompts, open_llm
from tests.e2e.test_quantize import logits
from tests.guards.sources import modules

OFFSET, WINDOW = 0.5, 19
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "torch_dtype": "float32",
}  # fmt: skip


def read_toy(config: Config) -> dict[str, Any]:
    layers, window = size(config, "num_hidden_layers"), size(config, "toy_window")
    theta, head_dim = positive(config, "toy_base"), config["head_dim"]
    return {
        "windows": tuple(window if layer % 2 else None for layer in range(layers)),
        "rope": RopeShape.read(config, {}, head_dim=head_dim, theta=theta),
    }


TOY = ModelFamily(
    model_type="toy", read=read_toy, head_dim=32, head_norms=True, norm_offset=OFFSET,
    fused_on_disk=True, ties_head=True, planned_alike=("toy_moe",),
)  # fmt: skip


OTHER = replace(TOY, model_type="toy2")


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_BY_NAME", dict(families._BY_NAME))
    register_family(TOY)


def write_toy(folder: Path) -> Path:
    """A random checkpoint as the record says that they lie on disk."""
    write_tiny_llama(folder, head_dim=TOY.head_dim, tie_word_embeddings=True, **SIZES)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(5)

    def norm(width: int) -> Tensor:
        return torch.randint(32, 96, (width,), generator=generator) / 64

    for name in [name for name in tensors if "norm" in name]:
        tensors[name] = norm(SIZES["hidden_size"]) - OFFSET
    for layer in range(SIZES["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for group, fused in (("self_attn.|q|k|v", "qkv"), ("mlp.|gate|up", "gate_up")):
            prefix, *parts = group.split("|")
            rows = [tensors.pop(f"{at}{prefix}{part}_proj.weight") for part in parts]
            tensors[f"{at}{prefix}{fused}_proj.weight"] = torch.cat(rows)
        for name in ("q_norm", "k_norm"):
            tensors[f"{at}self_attn.{name}.weight"] = norm(32) - OFFSET
    save_file(tensors, folder / "model.safetensors")
    config = {**SIZES, "model_type": "toy", "toy_window": WINDOW, "toy_base": 500.0}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_twin(toy: Path, folder: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    heads = {"q": 4 * 32, "k": 2 * 32, "v": 2 * 32}
    for name, tensor in load_file(toy / "model.safetensors").items():
        if "norm" in name:
            tensors[name] = tensor + OFFSET
        elif "qkv" in name:
            for part, rows in zip(heads, tensor.split(list(heads.values())), strict=True):
                tensors[name.replace("qkv", part)] = rows.contiguous()
        elif "gate_up" in name:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up", part)] = rows.contiguous()
        else:
            tensors[name] = tensor
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    more = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    config = {**SIZES, **more, "model_type": "qwen3", "head_dim": 32, "rope_theta": 500.0}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


def test_it_is_run_as_the_record_says(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    assert torch.equal(logits(toy), logits(write_twin(toy, tmp_path / "twin")))


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    prompts, parameters = make_prompts(5, 3), {"temperature": 0.9, "seed": 5, "max_tokens": 16}
    with open_llm(toy, None, "plain", **PRESSURES["one at a time"]) as llm:
        expected = generate(llm, prompts, parameters)
    for method, pressure in (("ngram", "calm"), ("junk", "chunks")):
        with open_llm(toy, None, method, **PRESSURES[pressure]) as llm:
            assert generate(llm, prompts, parameters) == expected, (method, pressure)
    config = {"method": "draft_model", "model": str(toy), "num_speculative_tokens": 4}
    settings: dict[str, Any] = {"batch_invariant": True, "adaptive_speculation": False}
    with LLM(str(toy), dtype="float32", speculative_config=config, **settings) as llm:
        assert generate(llm, prompts, parameters) == expected, "as its own draft model"
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    trees = TreeProposer(VOCAB, outputs=known, seed=2)
    with LLM(str(toy), proposer=trees, dtype="float32", batch_invariant=True) as llm:
        assert generate(llm, prompts, parameters) == expected, "trees"


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_it_is_quantized(tmp_path: Path, scheme: str) -> None:
    toy = write_toy(tmp_path / "toy")
    arguments = ["quantize", str(toy), str(tmp_path / "out"), "--scheme", scheme]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert torch.equal(logits(tmp_path / "out", scheme), logits(toy, scheme))


def test_it_is_planned_and_described(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    shape, planned = ModelShape.from_config(toy), load_plan_model(str(toy), "target")
    stored = sum(tensor.numel() for tensor in load_file(toy / "model.safetensors").values())
    assert planned.params == shape.parameter_count() == stored
    assert planned.shape.head_dim == shape.head_dim == 32
    result = CliRunner().invoke(app, ["info", str(toy), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["architecture"] == "toy"


def test_what_it_does_not_run_is_refused_by_name(tmp_path: Path) -> None:
    toy = write_toy(tmp_path / "toy")
    config = json.loads((toy / "config.json").read_text())
    (toy / "config.json").write_text(json.dumps({**config, "model_type": "toi"}))
    with pytest.raises(UnsupportedModelError, match=r"llama.*toy"):
        ModelShape.from_config(toy)


def test_a_name_is_registered_once() -> None:
    register_family(TOY)
    with pytest.raises(ConfigError, match="toy"):
        register_family(replace(TOY, head_dim=16))


def test_a_package_names_its_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """By entry points, which are loaded when a model of the family is asked for."""
    group = "foretoken.families"
    named = [
        EntryPoint("toy2", f"{__name__}:OTHER", group),
        EntryPoint("toy3", f"{__name__}:SIZES", group),
    ]
    monkeypatch.setattr(families, "_plugins", lambda: EntryPoints(named))
    assert families.find_family("toy2") is OTHER
    assert families.find_family("toy4") is None
    with pytest.raises(ConfigError, match="toy3.*ModelFamily"):
        families.find_family("toy3")


def literals() -> Iterator[tuple[str, str]]:
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield module.path, node.value


@pytest.mark.slow
def test_no_other_file_names_a_family() -> None:
    """Llama apart, which heads and exports say that they are; tables of GGUF files and of models
    that see pictures have families' names, and files of block heads say that their layers are
    Qwen3's, as published ones do."""
    tables = ("shape/families.py", "shape/gguf_architectures.py", "shape/multimodal.py")
    names = {family.model_type for family in families.families()} - {"llama"}
    elsewhere = {(path, text) for path, text in literals() if text in names and path not in tables}
    assert elsewhere == {("training/heads/dflash/files.py", "qwen3")}
