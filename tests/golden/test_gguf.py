"""GGUF files against the floats that the `gguf` package multiplies them out to.

The guarded bugs: halves of bytes or 6-bit scales in the wrong order, query and key heads left in
llama.cpp's order, a tied head or a tokenizer that is another one.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.kernels.library import find_library
from foretoken.models import LoadOptions, load_model
from foretoken.models.decoder import Decoder
from foretoken.shape import ModelShape
from foretoken.testing import write_tiny_llama
from foretoken.text.tokenizer import Tokenizer
from tests.golden.gguf_files import ggml_rows
from tests.golden.quantized import open_both
from tests.golden.scenario import forward, in_pieces, open_runner

Kind = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    "self_attn.": "attn_",
    "mlp.": "ffn_",
    "_proj": "",
    "model.layers.": "blk.",
}
MIXED = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "embed_tokens": Kind.Q6_K}
"""As in Q4_K_M."""


def random_blocks(weight: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Bytes of K-quants, for which `gguf` has no rounding: any bytes, with fitting scales."""
    draw = np.random.default_rng(weight.shape[0])
    _, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = weight.shape
    blocks = draw.integers(0, 256, (rows, columns // 256, size), np.uint8)
    places = {Kind.Q4_K: ((0, 0.0004), (2, 0.0029)), Kind.Q6_K: ((208, 0.00005),)}[kind]
    for at, scale in places:
        drawn = (scale * draw.uniform(0.5, 1.5, (rows, columns // 256, 1))).astype(np.float16)
        blocks[..., at : at + 2] = drawn.view(np.uint8)
    return blocks.reshape(rows, -1)


def write_both(
    folder: Path, kinds: dict[str, Kind], freqs: np.ndarray[Any, Any] | None = None, **sizes: Any
) -> tuple[Path, Path]:
    """A GGUF file and a folder with the floats; `kinds`: part of a name -> type, "" the rest."""
    floats_folder = write_tiny_llama(folder / "floats", **{**SIZES, **sizes})
    config = json.loads((floats_folder / "config.json").read_text())
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_eos_token_id(5)
    if freqs is not None:
        writer.add_tensor("rope_freqs.weight", freqs)
    floats: dict[str, Tensor] = {}
    for name, tensor in load_file(floats_folder / "model.safetensors").items():
        stored_name = name
        for old, new in NAMES.items():
            stored_name = stored_name.replace(old, new)
        array = tensor.numpy()
        if array.ndim == 1:
            writer.add_tensor(stored_name, array)
            floats[name] = tensor
            continue
        kind = next(kinds[part] for part in (*kinds, "") if part in name)
        is_k = kind in (Kind.Q4_K, Kind.Q6_K)
        rows = random_blocks(array, kind) if is_k else quantize(array, kind)
        floats[name] = torch.tensor(np.asarray(dequantize(rows, kind), np.float32))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        for part, count in heads.items():
            rows = ggml_rows(rows, config[count]) if part in name else rows
        writer.add_tensor(stored_name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(floats, floats_folder / "model.safetensors")
    return path, floats_folder


CASES: dict[str, tuple[dict[str, Kind], dict[str, Any]]] = {
    "Q8_0": ({"": Kind.Q8_0}, {}),
    "Q4_0, tied": ({"": Kind.Q4_0}, {"tie_word_embeddings": True}),
    "Q4_1": ({"": Kind.Q4_1}, {}),
    "Q4_K_M": ({**MIXED, "": Kind.Q4_K}, {"tie_word_embeddings": True}),
    "F16": ({"": Kind.F16}, {}),
    "BF16": ({"": Kind.BF16}, {}),
}


@pytest.fixture(params=CASES)
def both(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    kinds, sizes = CASES[request.param]
    return write_both(tmp_path, kinds, **sizes)


def test_matrices_are_those_of_the_package(both: tuple[Path, Path]) -> None:
    found, expected = open_both(both)
    for name in expected.names():
        wanted = expected.peek(name)
        if wanted.ndim == 1:
            assert torch.equal(found.take(name, wanted.shape), wanted)
            continue
        weights = found.matrix(name.removesuffix(".weight"), (wanted.shape[0], wanted.shape[1]))
        if not isinstance(weights, Tensor):
            weights = weights.dequantized(torch.float32)
        torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(found.take(name, wanted.shape), wanted, rtol=0, atol=0)
    found.finish()


def test_logits_and_rows(both: tuple[Path, Path]) -> None:
    ids = [1 + 7 * i % 90 for i in range(40)]
    pages = list(range(20))
    runner = open_runner(both[0], batch_invariant=True)
    found = forward(runner, [(ids, 0, 40, pages)])
    expected = forward(open_runner(both[1]), [(ids, 0, 40, pages)])
    assert (found - expected).abs().max() < 2e-3 * expected.std()
    assert torch.equal(in_pieces(runner, ids, pages, [1] * 40), found)


@pytest.mark.skipif(find_library() is None, reason="without kernels all is multiplied out")
def test_what_kernels_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, _ = write_both(tmp_path, {**MIXED, "": Kind.Q4_K})
    cpu = torch.device("cpu")
    options = LoadOptions(dtype=torch.float32, device=cpu, batch_invariant=True, page_size=16)
    with caplog.at_level("INFO", logger="foretoken"):
        model = load_model(path, options)
    kept = "matrices are kept 7 as Q4_K in the file's bits; 5 as Q6_K in the file's bits"
    assert f"gguf: Q4_K, Q6_K: {kept}" in caplog.text
    assert isinstance(model, Decoder) and model.compiled is not None, (
        "parts of two types are joined"
    )


def test_a_tokenizer_in_the_file(tmp_path: Path) -> None:
    own = Tokenizer(find_model("demo"))
    content = json.loads(own.to_json())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].get)
    path = tmp_path / "tokenizer.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in content["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Tokenizer.of_folder(path)
    assert found is not None
    for text in ("def f(x):\n    return x", "  two\n\n\tthree 123", "naïve"):
        expected = own.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == expected
        assert found.decode(expected) == text


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_positions(tmp_path: Path, factor: float) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    path, floats = write_both(
        tmp_path, {"": Kind.Q8_0}, rope_theta=500000.0, rope_scaling=rope, freqs=llama3(rope)
    )
    assert ModelShape.from_config(path).rope == ModelShape.from_config(floats).rope


def llama3(rope: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What transformers divides the frequencies by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(hidden_size=256, num_attention_heads=4)
    config.rope_parameters = {**rope, "rope_theta": 500000.0}
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** -(torch.arange(0, 64, 2) / 64)
    found: np.ndarray[Any, Any] = (plain / scaled).numpy()
    return found


def test_broken_files(tmp_path: Path) -> None:
    path, _ = write_both(tmp_path, {"": Kind.Q8_0})
    content = path.read_bytes()
    for keep in (0.0, 0.1, 0.6):
        broken = tmp_path / f"{keep}.gguf"
        broken.write_bytes(content[: int(keep * len(content))])
        with pytest.raises(CheckpointError, match="GGUF"):
            ModelShape.from_config(broken)
    other = tmp_path / "other.gguf"
    other.write_bytes(content.replace(b"llama", b"llamb"))
    with pytest.raises(UnsupportedModelError, match="llamb"):
        ModelShape.from_config(other)
