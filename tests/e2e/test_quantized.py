"""The promises hold for quantized models too: same tokens with drafts and without."""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.testing import write_tiny_llama
from foretoken.text.tokenizer import Tokenizer
from tests.golden import quantized as ready
from tests.golden.test_gguf import MIXED, Kind
from tests.golden.test_gguf import write_both as write_gguf

LENGTHS = (8, 13, 38)
PROMPTS: list[Any] = [{"prompt_token_ids": [1 + n * i % 90 for i in range(n)]} for n in LENGTHS]
PARAMETERS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
]


def tokens(model: Path, speculative: dict[str, Any] | None, **settings: Any) -> list[list[int]]:
    settings |= {"batch_invariant": True, "adaptive_speculation": False}
    llm = LLM(str(model), speculative_config=speculative, **settings)
    found = []
    for parameters in PARAMETERS:
        outputs = llm.generate(PROMPTS, parameters, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["int8", "int4"])
def test_same_tokens_with_any_draft(model: Path, target: str, dtype: str) -> None:
    expected = tokens(model, None, quantization=target, dtype=dtype)
    for draft in (None, "int8", "int4"):
        speculative = {"model": str(model), "num_speculative_tokens": 4, "quantization": draft}
        assert tokens(model, speculative, quantization=target, dtype=dtype) == expected
    look_up = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 6}
    room = 60_000 if dtype == "float32" else 30_000
    short = {"kv_cache_memory_bytes": room, "block_size": 8}
    for config in (None, look_up):
        assert tokens(model, config, quantization=target, dtype=dtype, **short) == expected
    chunked = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    assert tokens(model, None, quantization=target, dtype=dtype, **chunked) == expected


def test_a_quantized_draft_leaves_the_output_alone(model: Path) -> None:
    plain = tokens(model, None, dtype="float32")
    speculative = {"model": str(model), "num_speculative_tokens": 4, "quantization": "int4"}
    assert tokens(model, speculative, dtype="float32") == plain
    assert tokens(model, None, dtype="float32", quantization="int4") != plain


def compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": "int", "strategy": "channel", **weights}}
    return {"format": layout, "config_groups": {"group_0": {"targets": ["Linear"], **group}}}


PACKED = "pack-quantized"
FOUR = {"strategy": "group", "group_size": 32}
READY_MADE: dict[str, tuple[str, dict[str, Any], ready.Writer]] = {
    "gptq": (
        "gptq",
        {"bits": 4, "group_size": 128, "sym": False},
        ready.gptq(group=128, symmetric=False),
    ),
    "awq": ("awq", {"bits": 4, "group_size": 32, "zero_point": True}, ready.awq()),
    "fp8": (
        "fp8",
        {"weight_block_size": [48, 64]},
        ready.fp8(per="block", suffix="weight_scale_inv"),
    ),
    "W8A16": ("compressed-tensors", compressed("int-quantized", 8), ready.plain_int8()),
    "W4A16": ("compressed-tensors", compressed(PACKED, 4, **FOUR), ready.packed()),
    "FP8, weights only": (
        "compressed-tensors",
        compressed("float-quantized", 8, type="float"),
        ready.fp8(per="output"),
    ),
}
GGUF: dict[str, dict[str, Any]] = {
    "Q8_0": {"": Kind.Q8_0},
    "Q4_K_M": {**MIXED, "": Kind.Q4_K},
    "Q4_K_M, tied": {**MIXED, "": Kind.Q4_K},
}


@pytest.mark.parametrize("name", [*READY_MADE, *GGUF])
def test_ready_made_same_tokens_with_any_draft(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in GGUF:
        monkeypatch.setattr(Tokenizer, "of_folder", lambda folder: None)
        tied = name.endswith("tied")
        (model, _), method = write_gguf(tmp_path, GGUF[name], tie_word_embeddings=tied), "gguf"
    else:
        method, config, writer = READY_MADE[name]
        model, _ = ready.write_both(tmp_path, {"quant_method": method, **config}, writer)
    expected = tokens(model, None)
    assert tokens(model, None, quantization=method) == expected
    for draft in (None, "int8"):
        speculative = {"model": str(model), "num_speculative_tokens": 4, "quantization": draft}
        assert tokens(model, speculative) == expected
    assert tokens(model, {"method": "ngram", "prompt_lookup_min": 1}) == expected
    assert tokens(model, None, max_num_batched_tokens=16, max_num_seqs=2) == expected


def test_names_that_are_not_the_checkpoints(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
        LLM(str(model), quantization="gptq")
    model, _ = ready.write_both(tmp_path, {"quant_method": "awq", "bits": 4}, ready.awq())
    with pytest.raises(ConfigError, match="the checkpoint is awq"):
        LLM(str(model), quantization="gptq")


def test_formats_that_are_not_read(tmp_path: Path) -> None:
    for config, said in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantization='int8' or 'int4'"),
        (
            {"quant_method": "hqq", "weights": "int4"},
            "compressed-tensors, gptq, awq, fp8, mxfp4, or the",
        ),
        ({"quant_method": "quip"}, "16-bit checkpoint with quantization='int8' or 'int4'"),
        ({"quant_method": "gptq", "bits": 3}, "4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemm"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "int-quantized"),
    ):
        model = write_tiny_llama(tmp_path / said, quantization_config=config)
        with pytest.raises(UnsupportedModelError, match=said):
            LLM(str(model))
