"""Single matrices of quantized checkpoints. The guarded bugs: tensors that do not fit each other
are read as some matrix all the same, a layout that others write is refused."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.errors import CheckpointError, UnsupportedModelError
from foretoken.quant import IntWeights
from foretoken.quant.arrange import Weights
from foretoken.quant.formats.awq import AwqFormat
from foretoken.quant.formats.base import Format
from foretoken.quant.formats.compressed import CompressedFormat
from foretoken.quant.formats.fp8 import Fp8Format
from foretoken.quant.formats.gptq import GptqFormat
from foretoken.shape.memory_formula import Held
from foretoken.shape.stored import FLOATS, StoredScheme, stored_scheme

N, K = 4, 64
COMPRESSED, FP8 = CompressedFormat((2, 32)), Fp8Format((2, 32))
GPTQ = GptqFormat(zeros_less_one=True)
INTEGERS = torch.arange(N * K).remainder(17).sub(8).to(torch.int8).view(N, K)
EIGHTH = INTEGERS.float().div(8).to(torch.float8_e4m3fn)
SCALES = torch.tensor([0.5, 1.0, 2.0, 4.0])
WORDS = torch.zeros(N, K // 8, dtype=torch.int32)
"""Packed: every value is -8."""


@dataclass
class Stored:
    """The tensors of a module "m"."""

    tensors: dict[str, Tensor]
    used: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name.removeprefix("m.") in self.tensors

    def raw(self, name: str) -> Tensor:
        self.used.add(name.removeprefix("m."))
        return self.peek(name)

    def ignore(self, name: str) -> None:
        self.used.add(name.removeprefix("m."))

    def peek(self, name: str) -> Tensor:
        return self.tensors[name.removeprefix("m.")]


def read(format_: Format, **tensors: Tensor) -> Weights | None:
    """The matrix; every tensor of it has been used."""
    stored = Stored(tensors)
    found = format_.matrix(stored, "m", K)
    assert stored.used == set(tensors)
    return found


def floats(weights: Weights | None) -> Tensor:
    assert weights is not None
    return weights if isinstance(weights, Tensor) else weights.dequantized(torch.float32)


def test_one_scale_for_the_whole_matrix() -> None:
    found = read(COMPRESSED, weight=INTEGERS, weight_scale=torch.tensor(0.25))
    assert isinstance(found, IntWeights)
    assert torch.equal(floats(found), INTEGERS.float() * 0.25)


def test_scales_of_outputs_without_a_second_dimension() -> None:
    expected = INTEGERS.float() * SCALES[:, None]
    assert torch.equal(floats(read(COMPRESSED, weight=INTEGERS, weight_scale=SCALES)), expected)
    expected = EIGHTH.float() * SCALES[:, None]
    assert torch.equal(floats(read(FP8, weight=EIGHTH, weight_scale=SCALES)), expected)
    assert torch.equal(floats(read(COMPRESSED, weight=EIGHTH, weight_scale=SCALES)), expected)


def test_packed_values_with_zero_points_that_are_not_packed() -> None:
    zeros = torch.tensor([[-8], [-7], [0], [7]], dtype=torch.int8)
    scale = SCALES[:, None]
    found = read(COMPRESSED, weight_packed=WORDS, weight_scale=scale, weight_zero_point=zeros)
    assert torch.equal(floats(found), (-8.0 - zeros.float()).mul(scale).expand(N, K))


def test_zero_points_of_floats_have_to_be_zero() -> None:
    zeros = torch.zeros(N, 1, dtype=torch.int8)
    found = read(COMPRESSED, weight=EIGHTH, weight_scale=SCALES, weight_zero_point=zeros)
    assert torch.equal(floats(found), EIGHTH.float() * SCALES[:, None])
    with pytest.raises(CheckpointError, match="zeros only"):
        read(COMPRESSED, weight=EIGHTH, weight_scale=SCALES, weight_zero_point=zeros + 1)


def test_a_group_index_of_minus_ones_says_nothing() -> None:
    """llm-compressor writes one where inputs are in their own order."""
    index = torch.full((K,), -1, dtype=torch.int32)
    found = read(COMPRESSED, weight=INTEGERS, weight_scale=SCALES, weight_g_idx=index)
    assert torch.equal(floats(found), INTEGERS.float() * SCALES[:, None])


@pytest.mark.parametrize("format_", [COMPRESSED, FP8, GPTQ, AwqFormat()])
def test_a_module_of_plain_floats_is_left_to_others(format_: Format) -> None:
    assert format_.matrix(Stored({"weight": torch.zeros(N, K)}), "m", K) is None


BROKEN: dict[str, tuple[Format, dict[str, Tensor], str]] = {
    "integers of another type": (
        COMPRESSED,
        {"weight": INTEGERS.to(torch.int16), "weight_scale": SCALES},
        "int16.*int8",
    ),
    "floats of another type": (
        FP8,
        {"weight": EIGHTH.to(torch.float16), "weight_scale_inv": SCALES},
        "float16.*float8_e4m3fn",
    ),
    "blocks of another size": (
        FP8,
        {"weight": EIGHTH, "weight_scale_inv": torch.ones(2, 3)},
        r"\[2, 3\].*\[2, 2\]",
    ),
    "another shape than config.json says": (
        COMPRESSED,
        {"weight_packed": WORDS, "weight_shape": torch.tensor([N, 2 * K]), "weight_scale": SCALES},
        r"\[4, 128\].*\[4, 64\], as config.json says",
    ),
    "neither 4 nor 8 bits": (
        COMPRESSED,
        {"weight_packed": WORDS[:, :5], "weight_scale": SCALES},
        "64 values in 5 words.*4 or 8 bits",
    ),
    "scales of other outputs": (
        COMPRESSED,
        {"weight": INTEGERS, "weight_scale": SCALES[:3]},
        r"weight_scale \[3, 1\].*\[4, 1\]",
    ),
    "groups that do not divide the inputs": (
        COMPRESSED,
        {"weight": INTEGERS, "weight_scale": torch.ones(N, 3)},
        "3 of 64 inputs.*a divisor",
    ),
    "an input of a group that is not there": (
        COMPRESSED,
        {
            "weight": INTEGERS,
            "weight_scale": torch.ones(N, 2),
            "weight_g_idx": torch.arange(K) // 16,
        },
        "g_idx: got '0 to 3'; allowed: 0 to 1",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_tensors_that_do_not_fit(case: str) -> None:
    format_, tensors, said = BROKEN[case]
    with pytest.raises(CheckpointError, match=said):
        read(format_, **tensors)


# What a quantization_config says. The guarded bugs: a variant that is read as another one, an
# error that does not say what to use instead.
INSTEAD = "16-bit checkpoint with quantization='int8' or 'int4'"


def compressed(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"format": "mixed-precision", "config_groups": named, **fields}


def read_scheme(given: object, field: str = "quantization_config") -> StoredScheme | None:
    return stored_scheme({field: given})


INT4 = {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}}
INT8 = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "hqq"}, INSTEAD),
        (compressed(INT4, format="marlin-24"), INSTEAD),
        (compressed({**INT4, "format": "nvfp4-pack-quantized"}), INSTEAD),
        (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        (compressed(INT4, transform_config={"config_groups": {}}), "transform_config"),
        (compressed(INT4, kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (compressed({"weights": {"num_bits": 2}}), "int2.*int of 4 or 8 bits"),
        (compressed({"weights": {"num_bits": 4, "type": "float"}}), "float4.*float of 8 bits"),
        ({"quant_method": "gptq", "bits": 3}, INSTEAD),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "gptq_v2"),
        ({"quant_method": "awq", "bits": 8}, "bits.*allowed: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "gemm"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e4m3"),
    ],
)
def test_variants_that_are_not_read(given: object, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        read_scheme(given)


@pytest.mark.parametrize(
    "given",
    [
        "gptq",
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "fp8", "weight_block_size": 128},
    ],
)
def test_values_of_the_wrong_kind(given: object) -> None:
    with pytest.raises(CheckpointError, match="config.json"):
        read_scheme(given)


def test_an_older_field_and_no_method() -> None:
    """Early compressed-tensors wrote `compression_config`, and named no method."""
    found = read_scheme(compressed(INT4), "compression_config")
    assert found is not None and found.describe() == "compressed-tensors: int4, groups of 128"
    assert stored_scheme({}) is None


def test_mixed_groups() -> None:
    """Groups without weights say nothing; memory is counted by the widest of the others."""
    outputs = {"output_activations": {"num_bits": 8}}
    sparse = {"sparsity_config": {"format": "dense"}}
    found = read_scheme(compressed(INT4, INT8, outputs, **sparse))
    assert found is not None
    assert found.weights == "int4, groups of 128; int8, per output"
    assert found.held == (Held(1.0, 8),) and found.rounds_activations
    nothing = read_scheme(compressed(outputs))
    assert nothing is not None and nothing.weights == "floats" and nothing.held == (FLOATS,)
