"""Rounding of weights and the layers over them. The guarded bugs: steps that are not used, groups
of zeros that become NaN, a layer that computes other weights than it was given."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.backend import LinearSpec, PlainTorch, backend_for
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import CheckpointError, ConfigError, NotYetError, UnsupportedModelError
from foretoken.ops.linear import RowProbe
from foretoken.quant import IntWeights, Scheme, round_weights, scheme_of
from foretoken.quant.arrange import Weights
from foretoken.quant.formats.awq import AwqFormat
from foretoken.quant.formats.base import Format
from foretoken.quant.formats.compressed import CompressedFormat
from foretoken.quant.formats.fp8 import Fp8Format
from foretoken.quant.formats.gptq import GptqFormat
from foretoken.shape.memory_formula import Held
from foretoken.shape.stored import FLOATS, CheckpointQuantization, stored_scheme

CPU = torch.device("cpu")
SCHEMES = [
    scheme_of("int8"),
    *(
        Scheme(name="int4", bits=4, group=group, asymmetric=asymmetric)
        for group in (32, 64, 128)
        for asymmetric in (False, True)
    ),
]


BY_OTHERS = ("bitsandbytes", "quanto", "torchao")


def weights(outputs: int, inputs: int) -> Tensor:
    generator = torch.Generator().manual_seed(outputs)
    return torch.randn(outputs, inputs, generator=generator).bfloat16()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_weight_is_within_half_a_step(scheme: Scheme) -> None:
    weight_NK = weights(70, 256)
    weight_NK[3] = 0
    weight_NK[4, :100] = 0
    rounded = round_weights(weight_NK, scheme)
    found = rounded.dequantized(torch.float32)
    step = rounded.scale_NG.abs().repeat_interleave(256 // rounded.scale_NG.shape[1], 1)
    error = (found - weight_NK.float()).abs()
    # Symmetric 4-bit weights reach -8 on one side and 7 on the other: there it is a whole step.
    most = 1.0 if scheme.bits == 4 and not scheme.asymmetric else 0.5
    assert (error <= step * (most + 1e-3) + 1e-12).all()
    assert (error <= step * 0.501 + 1e-12).float().mean() > 0.97
    assert not found[3].any()
    used = rounded.values_NK.unique().numel()
    assert used > (200 if scheme.bits == 8 else 15)


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK = weights(50, 128)
    whole = round_weights(weight_NK, scheme_of("int4"))
    monkeypatch.setattr("foretoken.quant.rounding._PIECE", 1000)
    pieces = round_weights(weight_NK, scheme_of("int4"))
    assert torch.equal(whole.values_NK, pieces.values_NK)
    assert torch.equal(whole.scale_NG, pieces.scale_NG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layer_computes_the_weights_it_was_given(scheme: Scheme, dtype: torch.dtype) -> None:
    rounded = round_weights(weights(45, 384), scheme)
    x_TK = torch.randn(20, 384, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias_N = weights(45, 1)[:, 0].to(dtype)
    linear = backend_for(CPU).linear(LinearSpec(weights=rounded, dtype=dtype, bias_N=bias_N))
    expected = x_TK.double() @ rounded.dequantized(torch.float64).T + bias_N.double()
    tolerance = 3e-3 if dtype == torch.float32 else 2e-1
    torch.testing.assert_close(linear(x_TK).double(), expected, rtol=1e-2, atol=tolerance)


def test_without_kernels_it_is_dequantized() -> None:
    rounded = round_weights(weights(45, 64), scheme_of("int4"))
    x_TK = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    spec = LinearSpec(weights=rounded, dtype=torch.float32, probe=RowProbe())
    found = PlainTorch(CPU).linear(spec)(x_TK)
    torch.testing.assert_close(found, x_TK @ rounded.dequantized(torch.float32).T)


def test_groups_that_do_not_fit() -> None:
    int4 = Scheme(name="int4", bits=4, group=128)
    assert int4.fitted(256) == int4
    assert int4.fitted(192).group == 64
    assert int4.fitted(96).group == 32
    assert int4.fitted(100) == scheme_of("int8")
    assert int4.for_head() == scheme_of("int8")


def test_names() -> None:
    for name in QUANTIZATIONS:
        assert EngineConfig(model="m", quantization=name).quantization == name
        assert scheme_of(name).name == name
        draft = SpeculativeConfig.from_dict({"model": "d", "quantization": name}).drafters[0]
        assert draft.quantization == name


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ("int5", ConfigError, "None, int8, int4"),
        (8, ConfigError, "None, int8, int4"),
        *((name, NotYetError, "int8 or int4 at load: None, int8, int4") for name in BY_OTHERS),
        ("hqq", NotYetError, "int4 at load"),
        ("gptq_marlin_24", NotYetError, "gptq without sparsity"),
        ("modelopt_fp4", NotYetError, "of the 16-bit checkpoint: None, int8, int4"),
        ("quip", ConfigError, "None, int8, int4"),
    ],
)
def test_other_names(given: object, error: type[ConfigError], said: str) -> None:
    with pytest.raises(error, match=said):
        EngineConfig.from_kwargs(model="m", quantization=given)
    with pytest.raises(error, match="speculative_config.quantization"):
        SpeculativeConfig.from_dict({"model": "d", "quantization": given})


def test_drafters_without_weights_are_not_quantized() -> None:
    with pytest.raises(ConfigError, match="ngram has no weights"):
        SpeculativeConfig.from_dict({"method": "ngram", "quantization": "int8"})


# Single matrices of quantized checkpoints. The guarded bugs: tensors that do not fit each other
# are read as some matrix all the same, a layout that others write is refused.
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


def read_scheme(given: object, field: str = "quantization_config") -> CheckpointQuantization | None:
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
