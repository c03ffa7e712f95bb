"""The promises hold for quantized models too: same tokens with drafts and without."""

from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError, UnsupportedModelError
from foretoken.testing import write_tiny_llama
from tests.golden import quantized as ready

LENGTHS = (8, 13, 38)
PROMPTS: list[Any] = [{"prompt_token_ids": [1 + n * i % 90 for i in range(n)]} for n in LENGTHS]
PARAMETERS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, max_tokens=24, ignore_eos=True),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("quantized") / "model")


def tokens(folder: Path, speculative: dict[str, Any] | None, **settings: Any) -> list[list[int]]:
    llm = LLM(str(folder), batch_invariant=True, speculative_config=speculative, **settings)
    found = []
    for parameters in PARAMETERS:
        outputs = llm.generate(PROMPTS, parameters, use_tqdm=False)
        found += [list(output.outputs[0].token_ids) for output in outputs]
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("target", ["int8", "int4"])
def test_same_tokens_with_any_draft(folder: Path, target: str, dtype: str) -> None:
    expected = tokens(folder, None, quantization=target, dtype=dtype)
    for draft in (None, "int8", "int4"):
        speculative = {"model": str(folder), "num_speculative_tokens": 4, "quantization": draft}
        assert tokens(folder, speculative, quantization=target, dtype=dtype) == expected
    chunked = {"max_num_batched_tokens": 16, "max_num_seqs": 2}
    assert tokens(folder, None, quantization=target, dtype=dtype, **chunked) == expected


def test_a_quantized_draft_leaves_the_output_alone(folder: Path) -> None:
    plain = tokens(folder, None, dtype="float32")
    speculative = {"model": str(folder), "num_speculative_tokens": 4, "quantization": "int4"}
    assert tokens(folder, speculative, dtype="float32") == plain
    assert tokens(folder, None, dtype="float32", quantization="int4") != plain


READY_MADE: dict[str, tuple[dict[str, Any], ready.Writer]] = {
    "gptq": ({"bits": 4, "group_size": 128, "sym": False}, ready.gptq(group=128, symmetric=False)),
    "awq": ({"bits": 4, "group_size": 32, "zero_point": True}, ready.awq()),
    "fp8": ({"weight_block_size": [48, 64]}, ready.fp8(per="block", suffix="weight_scale_inv")),
}


@pytest.mark.parametrize("method", READY_MADE)
def test_ready_made_same_tokens_with_any_draft(tmp_path: Path, method: str) -> None:
    config, writer = READY_MADE[method]
    model, _ = ready.write_both(tmp_path, {"quant_method": method, **config}, writer)
    expected = tokens(model, None)
    assert tokens(model, None, quantization=method) == expected
    for draft in (None, "int8"):
        speculative = {"model": str(model), "num_speculative_tokens": 4, "quantization": draft}
        assert tokens(model, speculative) == expected
    assert tokens(model, None, max_num_batched_tokens=16, max_num_seqs=2) == expected


def test_names_that_are_not_the_checkpoints(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the checkpoint is not quantized"):
        LLM(str(folder), quantization="gptq")
    model, _ = ready.write_both(tmp_path, {"quant_method": "awq", "bits": 4}, ready.awq())
    with pytest.raises(ConfigError, match="the checkpoint is awq"):
        LLM(str(model), quantization="gptq")


def test_formats_that_are_not_read(tmp_path: Path) -> None:
    for config, said in (
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantization='int8' or 'int4'"),
        ({"quant_method": "hqq", "weights": "int4"}, "compressed-tensors, gptq, awq, fp8, or the"),
        ({"quant_method": "quip"}, "16-bit checkpoint with quantization='int8' or 'int4'"),
        ({"quant_method": "gptq", "bits": 3}, "4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemm"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "int-quantized"),
    ):
        model = write_tiny_llama(tmp_path / said, quantization_config=config)
        with pytest.raises(UnsupportedModelError, match=said):
            LLM(str(model))
