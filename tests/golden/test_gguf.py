"""GGUF files against the floats that the `gguf` package multiplies them out to, and each
architecture of them against transformers' logits."""

import json
import random
from collections.abc import Callable
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
from tests.golden.families import LONGROPE, OWN, VOCAB, YARN, expected_logits, write_checkpoint
from tests.golden.gguf_files import More, Rows, finish, write_gguf
from tests.golden.quantized import open_both
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables
from tests.golden.test_transformers import LENGTH, assert_close, write_multimodal
from tests.gpu_twins import twins

Kind = gguf.GGMLQuantizationType
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64,
}  # fmt: skip
MIXED = {"v_proj": Kind.Q6_K, "down_proj": Kind.Q6_K, "embed_tokens": Kind.Q6_K}
"""As in Q4_K_M."""


def random_blocks(weight: Rows, kind: Kind) -> Rows:
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
    folder: Path, kinds: dict[str, Kind], freqs: Rows | None = None, **sizes: Any
) -> tuple[Path, Path]:
    """A GGUF file and a folder with the floats; `kinds`: part of a name -> type, "" the rest."""
    floats_folder = write_tiny_llama(folder / "floats", **{**SIZES, **sizes})
    floats = load_file(floats_folder / "model.safetensors")

    def more(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_eos_token_id(5)
        if freqs is not None:
            writer.add_tensor("rope_freqs.weight", freqs)

    def pack(name: str, array: Rows) -> tuple[Rows, Kind]:
        kind = next(kinds[part] for part in (*kinds, "") if part in name)
        is_k = kind in (Kind.Q4_K, Kind.Q6_K)
        rows = random_blocks(array, kind) if is_k else quantize(array, kind)
        floats[name] = torch.tensor(np.asarray(dequantize(rows, kind), np.float32))
        return rows, kind

    path = write_gguf(floats_folder, "llama", more, path=folder / "model.gguf", pack=pack)
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


def test_a_gpus_steps_hold_integers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In groups; q, k and v, of two types, are one matrix of floats, so that steps are whole."""
    path, floats = write_both(tmp_path, {**MIXED, "": Kind.Q4_K})
    spans = [([1 + 7 * i % 90 for i in range(40)], 0, 40, list(range(20)))]
    expected = forward(open_runner(floats), spans)
    with twins(), caplog.at_level("INFO", logger="foretoken"):
        runner = open_runner(path, batch_invariant=True)
        assert isinstance(runner.model, Decoder) and runner.model.captured is not None
        found = forward(runner, spans)
    kept = "matrices are kept 5 as int4 in groups of 32; 2 as int8 in groups of 16; 2 as float32"
    assert kept in caplog.text
    assert (found - expected).abs().max() < 2e-3 * expected.std()


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
    finish(writer)
    found = Tokenizer.of_folder(path)
    assert found is not None
    for text in ("def f(x):\n    return x", "  two\n\n\tthree 123", "naïve"):
        expected = own.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == expected
        assert found.decode(expected) == text


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_positions(tmp_path: Path, factor: float) -> None:
    rope = {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
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


# Each architecture of GGUF files: a file of a tiny checkpoint gives transformers' logits. The
# guarded bugs: heads in another order, 1 added to a norm twice, fused matrices cut elsewhere,
# positions that are not those of the metadata, what no file says and every reader has to know.
Write = Callable[[Path], Any]
Kinds = gguf.RopeScalingType


def own(case: str, **changes: Any) -> Write:
    kind, fields = OWN[case]
    return lambda folder: write_checkpoint(folder, kind, {**fields, **changes})


def text(kind: str, **changes: Any) -> Write:
    return lambda folder: write_checkpoint(folder, kind, changes)


def theta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])


def yarn(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    theta(writer, config)
    writer.add_rope_scaling_type(Kinds.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def linear(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    theta(writer, config)
    writer.add_rope_scaling_type(Kinds.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])


def window(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    theta(writer, config)
    writer.add_sliding_window(config["sliding_window"] or 0)


def ministral3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    yarn(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def olmo3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    yarn(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(pattern)


def gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As converted: no base, no period."""
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As older files have it: neither the pattern nor the base of layers with a window."""
    window(writer, config)
    scaling = config["rope_parameters"]["full_attention"]
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(Kinds.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def newer_gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gemma3(writer, config)
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(pattern)
    base = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    writer.add_float32("gemma3.rope.freq_base_swa", base)


def phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    window(writer, config)
    rope = config["rope_parameters"]
    original = config.get("original_max_position_embeddings")
    writer.add_rope_scaling_orig_ctx_len(original or config["max_position_embeddings"])
    size = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


GEMMA = {"query_pre_attn_scalar": 16}
PHI = {"hidden_size": 32, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
ARCH_CASES: dict[str, tuple[str, Write, More]] = {
    "llama": ("llama", own("llama other theta"), theta),
    "llama biases": ("llama", own("llama biases"), theta),
    "llama linear": ("llama", own("llama linear rope"), linear),
    "llama yarn": ("llama", own("llama yarn rope"), yarn),
    "mistral": ("llama", own("mistral window"), window),
    "mistral3": ("mistral3", own("mistral no window"), theta),
    "ministral3": ("mistral3", own("ministral3"), ministral3),
    "smollm3": ("smollm3", own("smollm3"), theta),
    "olmo2": ("olmo2", own("olmo2"), theta),
    "olmo3": ("olmo2", own("olmo3"), olmo3),
    "qwen2": ("qwen2", own("qwen2"), theta),
    "qwen2 yarn": ("qwen2", text("Qwen2", rope_parameters=YARN), yarn),
    "qwen2vl": ("qwen2vl", lambda folder: write_multimodal(folder, "qwen2_vl"), theta),
    "qwen3": ("qwen3", own("qwen3 tied"), theta),
    "qwen3vl": ("qwen3vl", lambda folder: write_multimodal(folder, "qwen3_vl"), theta),
    "gemma": ("gemma", own("gemma"), lambda writer, config: None),
    "gemma2": ("gemma2", own("gemma2", **GEMMA), gemma2),
    "gemma3": ("gemma3", own("gemma3 usual layers", **GEMMA), gemma3),
    "gemma3 newer": (
        "gemma3",
        own("gemma3 two kinds of positions", **GEMMA, rope_parameters=LOCAL),
        newer_gemma3,
    ),
    "phi3 window": ("phi3", own("phi3 window"), phi3),
    "phi3 partial rotary": ("phi3", own("phi3 partial rotary"), phi3),
    "phi3 long": ("phi3", text("Phi3", **PHI), phi3),
}


@pytest.mark.parametrize("case", ARCH_CASES)
def test_logits_agree(case: str, tmp_path: Path) -> None:
    arch, write, more = ARCH_CASES[case]
    model = write(tmp_path)
    path = write_gguf(tmp_path, arch, more)
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(LENGTH)]
    pages = tables(draw, [LENGTH], together=False)[0]
    runner, wanted = open_runner(path, batch_invariant=True), expected_logits(model, ids)
    found = forward(runner, [(ids, 0, LENGTH, pages)])
    assert_close(found, wanted)
    assert torch.equal(in_pieces(runner, ids, pages, cut(draw, LENGTH, [1, 2, 9])), found)


def test_short_factors_are_chosen_by_the_longest_context(tmp_path: Path) -> None:
    model = text("Phi3", **PHI)(tmp_path)
    runner = open_runner(write_gguf(tmp_path, "phi3", phi3), max_model_len=40)
    ids = list(range(40))
    found = forward(runner, [(ids, 0, 40, list(range(10)))])
    assert_close(found, expected_logits(model, ids))


def test_a_model_in_parts(tmp_path: Path) -> None:
    model = own("llama other theta")(tmp_path)
    whole = gguf.GGUFReader(write_gguf(tmp_path, "llama", theta))
    stored = [(one.name, np.array(one.data)) for one in whole.tensors]
    paths = [tmp_path / f"parts-{i:05}-of-00002.gguf" for i in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for key, entry in whole.fields.items() if number == 0 else ():
            if key.startswith("llama."):
                writer.add_key_value(key, entry.contents(), entry.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for name, rows in stored[number::2]:
            writer.add_tensor(name, rows)
        finish(writer)
    ids = list(range(30))
    found = forward(open_runner(paths[0]), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))
