"""What a device computes with. The guarded bugs: a head rounded below 8 bits, a backend that gives
another number than the reference, a type that the kernels do not take."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.backend import Backend, CpuKernels, LinearSpec, PlainTorch, backend_for
from foretoken.ops.linear import KernelLinear, PlainLinear
from foretoken.quant import IntWeights, round_weights, scheme_of

CPU = torch.device("cpu")


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def backends() -> list[Backend]:
    """Those that run here; the reference first."""
    return list(dict.fromkeys([PlainTorch(CPU), backend_for(CPU)]))


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("is_head", [False, True])
def test_all_backends_compute_the_same_layer(quantization: str | None, *, is_head: bool) -> None:
    spec = LinearSpec(
        weights=normal(1, 40, 96),
        dtype=torch.float32,
        bias_N=normal(2, 40),
        adds_residual=True,
        is_head=is_head,
        quantization=quantization,
    )
    x_TK, residual_TN = normal(3, 7, 96), normal(4, 7, 40)
    found = [backend.linear(spec)(x_TK, residual_TN) for backend in backends()]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-3, atol=3e-3)


def test_a_head_is_never_rounded_below_8_bits() -> None:
    spec = LinearSpec(weights=normal(1, 32, 64), dtype=torch.float32, quantization="int4")
    assert spec.scheme == scheme_of("int4")
    head = replace(spec, is_head=True)
    assert head.scheme == scheme_of("int8") and head.out_dtype == torch.float32
    assert replace(spec, quantization=None).scheme is None


def test_integers_of_other_groups_become_floats() -> None:
    rounded = round_weights(normal(1, 32, 96), scheme_of("int4"))
    fitting = LinearSpec(weights=rounded, dtype=torch.float32)
    assert isinstance(fitting.settled().weights, IntWeights)
    odd = replace(
        rounded,
        values_NK=rounded.values_NK[:, :48],
        scale_NG=rounded.scale_NG.repeat_interleave(2, 1),  # Groups of 8 inputs.
    )
    settled = replace(fitting, weights=odd).settled()
    assert isinstance(settled.weights, Tensor)
    assert torch.equal(settled.weights, odd.dequantized(torch.float32))


def test_types_that_no_kernel_takes() -> None:
    half = LinearSpec(weights=normal(1, 8, 8).half(), dtype=torch.float16)
    for backend in backends():
        assert isinstance(backend.linear(half), PlainLinear)
        assert backend.rows(normal(2, 3, 8).half()) is None


def test_plain_torch_has_no_kernels() -> None:
    plain = PlainTorch(CPU)
    assert (plain.draw, plain.reject, plain.holds_integers) == (None, None, False)
    assert plain.rows(normal(1, 3, 8)) is None
    assert plain.why_not_int8 is not None and "multiplied out" in plain.why_not_int8
    gpu = PlainTorch(torch.device("cuda"))
    assert gpu.why_not_int8 is not None and "CPU only" in gpu.why_not_int8


def test_kernels_are_chosen_once() -> None:
    chosen = backend_for(CPU)
    assert backend_for(torch.device("cpu")) is chosen
    if not isinstance(chosen, CpuKernels):
        pytest.skip("no kernels here")
    assert chosen.holds_integers and chosen.why_not_int8 is None
    made = chosen.linear(LinearSpec(weights=normal(1, 8, 8), dtype=torch.float32))
    assert isinstance(made, KernelLinear) and made.kept == "float32"
    assert chosen.rows(normal(2, 8, 8)) is not None
    assert chosen.rows(normal(2, 8, 8).T) is None, "rows have to be dense"
