"""Integer weights as a GPU applies them, run by Triton's interpreter on the CPU. The guarded bugs:
a tail of rows, outputs or inputs lost, halves of a group exchanged, a zero point or scale of
another group, a row whose bits depend on its neighbours."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.backend import LinearSpec, TritonIntegers
from foretoken.ops.linear import Linear
from foretoken.quant import IntWeights, Scheme, round_weights
from foretoken.quant.triton_layer import TritonLinear
from tests.unit.kernels.triton_harness import DEVICE, compiles, normal, runs, tensor_cores

__all__ = ["tensor_cores"]
INT8 = Scheme(name="int8", bits=8, group=0)
SCHEMES = [
    INT8,
    *(
        Scheme(name="int4", bits=4, group=group, asymmetric=asymmetric)
        for group in (32, 64, 128)
        for asymmetric in (False, True)
    ),
    *(Scheme(name="int8", bits=8, group=group) for group in (32, 64, 128)),
]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def expected(weights: IntWeights, x_TK: Tensor) -> Tensor:
    """The reference: the matrix multiplied out, in double precision."""
    return x_TK.double() @ weights.dequantized(torch.float64).T


def assert_rounds_like_float32(found: Tensor, wanted: Tensor, size: Tensor) -> None:
    """Within float32 rounding of sums whose terms' sizes add up to `size`."""
    assert found.dtype == torch.float32
    assert ((found.double() - wanted).abs() <= 2e-6 * size + 1e-12).all()


@runs
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_the_reference_up_to_float32_rounding(scheme: Scheme, dtype: torch.dtype) -> None:
    """Tails everywhere: rows, outputs, and inputs where no group divides them."""
    for rows, outputs, inputs in ((1, 3, 128), (19, 70, 384), (33, 129, 256)):
        if not scheme.group:
            inputs += 37
        weights = round_weights(normal(outputs, outputs, inputs), scheme)
        x_TK = normal(1, rows, inputs).to(dtype)
        found = TritonLinear(weights, dtype=dtype, out_dtype=torch.float32)(x_TK)
        # With zero points, sums of values less 8 and of inputs are made apart.
        steps = weights.scale_NG.abs().repeat_interleave(inputs // weights.scale_NG.shape[1], 1)
        size = x_TK.double().abs() @ (steps * (128 if scheme.bits == 8 else 16)).double().T
        assert_rounds_like_float32(found, expected(weights, x_TK), size)


@runs
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.usefixtures("tensor_cores")
def test_a_rows_bits_are_its_own(scheme: Scheme, dtype: torch.dtype) -> None:
    inputs = 256 if scheme.group else 205
    linear = TritonLinear(round_weights(normal(0, 40, inputs), scheme), dtype=dtype)
    x_TK, residual_TN = normal(1, 37, inputs).to(dtype), normal(2, 37, 40).to(dtype)
    together = linear(x_TK, residual_TN)
    for start, stop in ((0, 1), (7, 8), (17, 18), (36, 37), (5, 11), (3, 20), (1, 34)):
        part = linear(x_TK[start:stop], residual_TN[start:stop])
        assert torch.equal(part, together[start:stop]), (start, stop)
    spoiled_TK = x_TK.clone()
    spoiled_TK[3] = torch.nan
    others = torch.arange(37, device=DEVICE) != 3
    assert torch.equal(linear(spoiled_TK, residual_TN)[others], together[others])


@runs
def test_zero_points_between_steps() -> None:
    """GGUF's minima are no whole numbers of steps."""
    weights = IntWeights(
        bits=4,
        values_NK=(normal(0, 20, 64) * 4 + 8).clamp(0, 15).to(torch.uint8),
        scale_NG=normal(1, 20, 2),
        zero_NG=normal(2, 20, 2) * 5,
    )
    x_TK = normal(3, 5, 64)
    found = TritonLinear(weights, dtype=torch.float32)(x_TK)
    torch.testing.assert_close(found.double(), expected(weights, x_TK), rtol=1e-5, atol=1e-3)


@runs
@pytest.mark.parametrize("dtype", TYPES)
def test_bias_residual_and_strides(dtype: torch.dtype) -> None:
    """One rounding at the end; rows and residuals that are parts of wider ones; no rows."""
    weights = round_weights(normal(0, 45, 96), SCHEMES[1])
    bias_N, wide_TX = normal(1, 45).to(dtype), normal(2, 18, 300).to(dtype)
    x_TK, residual_TN = wide_TX[:, 7:103], wide_TX[:, 200:245]
    linear = TritonLinear(weights, dtype=dtype, bias_N=bias_N)
    found = linear(x_TK, residual_TN)
    exact = expected(weights, x_TK) + bias_N.double() + residual_TN.double()
    torch.testing.assert_close(found, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-4)
    turned = linear(x_TK.T.contiguous().T, residual_TN.T.contiguous().T)
    assert torch.equal(turned, found)
    assert linear(x_TK[:0]).shape == (0, 45)


@runs
@pytest.mark.parametrize("scheme", [INT8, SCHEMES[1], SCHEMES[2]])
def test_it_keeps_the_bytes_of_the_formula(scheme: Scheme) -> None:
    linear = TritonLinear(round_weights(normal(0, 48, 256), scheme), dtype=torch.bfloat16)
    scales = 4 * 48 if not scheme.group else 2 * 48 * 8 * (2 if scheme.asymmetric else 1)
    assert linear.packed.num_bytes == 48 * 256 * scheme.bits // 8 + scales


@runs
def test_it_is_chosen_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """By both ways into a layer; groups that no kernel has are still multiplied out."""
    monkeypatch.setattr("foretoken.backend.say_which", lambda: None)
    backend, float32 = TritonIntegers(torch.device("cpu")), torch.float32
    weight_NK, x_TK = normal(0, 30, 64), normal(1, 4, 64)
    rounded = round_weights(weight_NK, SCHEMES[1])
    made: list[Linear] = [
        backend.linear(LinearSpec(weights=rounded, dtype=float32)),
        backend.linear(LinearSpec(weights=weight_NK, dtype=float32, quantization="int4")),
    ]
    for linear in made:
        assert isinstance(linear, TritonLinear)
        assert linear.kept == "int4 in groups of 32"
        found = linear(x_TK).double()
        torch.testing.assert_close(found, expected(rounded, x_TK), rtol=1e-5, atol=1e-4)
    odd = Scheme(name="int4", bits=4, group=16)
    other = backend.linear(LinearSpec(weights=round_weights(weight_NK, odd), dtype=float32))
    assert not isinstance(other, TritonLinear)


@compiles
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("scheme", [INT8, *SCHEMES[1:3], SCHEMES[-1]])
def test_it_compiles_for_gpus(
    scheme: Scheme, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To machine code, of two generations; this needs no GPU. 16-bit rows use tensor cores."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    compiler: Any = importlib.import_module("triton.compiler")
    backends: Any = importlib.import_module("triton.backends.compiler")
    kernel: Any = importlib.import_module("foretoken.kernels.triton.linear")._linear
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("x", "bias", "residual", "y"), f"*{kind}")
    numbers = "*fp16" if scheme.group else "*fp32"
    types |= {"values": "*u8" if scheme.bits == 4 else "*i8", "scale": numbers, "zero": numbers}
    constants: dict[str, Any] = {
        "BITS": scheme.bits,
        "GROUP": scheme.group,
        "STEP": scheme.group or 64,
    }
    constants |= {"TILE_M": 16, "TILE_N": 64, "WIDENS": False}
    constants |= {} if scheme.asymmetric else {"zero": None}
    types |= dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = compiler.ASTSource(fn=kernel, signature=types, constexprs=places)
    for capability in (80, 90):
        found = compiler.compile(source, target=backends.GPUTarget("cuda", capability, 32))
        assert found.asm["cubin"]
        assert ("mma" in found.asm["ptx"]) == (kind != "fp32")
