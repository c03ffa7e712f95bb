"""Rounding of weights and the layers over them. The guarded bugs: steps that are not used, groups
of zeros that become NaN, a layer that computes other weights than it was given."""

import pytest
import torch
from torch import Tensor

from foretoken.backend import LinearSpec, PlainTorch, backend_for
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError, NotYetError
from foretoken.ops.linear import RowProbe
from foretoken.quant import Scheme, round_weights, scheme_of

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
