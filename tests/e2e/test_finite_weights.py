"""A weight that is no number is refused at load by name: floats of any type, scales, heads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.cli.app import app
from foretoken.errors import CheckpointError
from foretoken.quant import IntWeights
from foretoken.quant.finite import check_finite
from foretoken.testing import write_tiny_llama

KV: dict[str, Any] = {"kv_cache_memory_bytes": 8 << 20, "max_model_len": 128}
BAD = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}
TENSORS = [
    "model.embed_tokens.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.0.input_layernorm.weight",
    "lm_head.weight",
]


def spoil(
    folder: Path, name: str, value: float, change: Callable[[Any], Any] = lambda t: t
) -> None:
    file = folder / "model.safetensors"
    tensors = {key: change(tensor) for key, tensor in load_file(str(file)).items()}
    tensors[name].view(-1)[-1] = value
    save_file(tensors, str(file))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("kind", BAD)
def test_floats(tmp_path: Path, dtype: str, quantization: str | None, kind: str) -> None:
    name = TENSORS[len(dtype + kind) % len(TENSORS)]
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, name, BAD[kind])
    with pytest.raises(CheckpointError, match=name) as caught:
        LLM(str(folder), dtype=dtype, quantization=quantization, **KV)
    said = "1 NaN and 0 infinite" if kind == "nan" else "0 NaN and 1 infinite"
    assert said in str(caught.value)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_every_tensor_of_any_stored_type(tmp_path: Path, name: str, stored: torch.dtype) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, name, float("nan"), lambda tensor: tensor.to(stored))
    with pytest.raises(CheckpointError, match=name):
        LLM(str(folder), **KV)


def test_what_overflows_in_the_type_it_is_converted_to(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    spoil(folder, TENSORS[1], 1e6)
    LLM(str(folder), dtype="float32", **KV).close()
    with pytest.raises(CheckpointError, match="finite numbers as float16"):
        LLM(str(folder), dtype="float16", **KV)


def test_models_that_transformers_runs(tmp_path: Path) -> None:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=96, max_position_embeddings=256,
    )  # fmt: skip
    GPTNeoXForCausalLM(config).save_pretrained(str(tmp_path))
    LLM(str(tmp_path), dtype="float32", **KV).close()
    spoil(tmp_path, "gpt_neox.layers.1.mlp.dense_h_to_4h.weight", float("nan"))
    with pytest.raises(CheckpointError, match="1 NaN"):
        LLM(str(tmp_path), dtype="float32", **KV)


def test_scales_of_stored_integers(tmp_path: Path) -> None:
    folder, out = write_tiny_llama(tmp_path / "model"), tmp_path / "int8"
    done = CliRunner().invoke(app, ["quantize", str(folder), str(out), "--scheme", "int8"])
    assert done.exit_code == 0, done.output
    names = load_file(str(out / "model.safetensors"))
    name = next(n for n in names if "down_proj" in n and "scale" in n)
    spoil(out, name, float("nan"))
    with pytest.raises(CheckpointError, match="scales"):
        LLM(str(out), dtype="float32", **KV)


def test_scales_and_zero_points() -> None:
    values = torch.zeros(4, 64, dtype=torch.uint8)
    for bad in BAD.values():
        scale, zero = torch.ones(4, 2), torch.full((4, 2), 8.0)
        good = IntWeights(bits=4, values_NK=values, scale_NG=scale, zero_NG=zero)
        check_finite("w", good)
        scale[3, 1] = bad
        with pytest.raises(CheckpointError, match="scales"):
            check_finite("w", good)
        scale[3, 1], zero[0, 0] = 1.0, bad
        with pytest.raises(CheckpointError, match="zero points"):
            check_finite("w", good)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_large_but_finite_numbers_are_fine(dtype: torch.dtype) -> None:
    """Their sum is not finite; they are."""
    check_finite("w", torch.full((64, 64), torch.finfo(dtype).max, dtype=dtype))


def test_heads(tmp_path: Path) -> None:
    source, folder = packaged_model("demo-eagle3"), tmp_path / "head"
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    name = next(n for n in load_file(str(folder / "model.safetensors")) if "norm" in n)
    spoil(folder, name, float("inf"))
    head = {"method": "eagle3", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(CheckpointError, match="infinite"):
        LLM("demo", speculative_config=head, **KV)
