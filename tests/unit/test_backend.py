"""What a device computes with. The guarded bugs: a head rounded below 8 bits, a backend that gives
another number than the reference, a type that the kernels do not take."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken import backend as backends_module
from foretoken.backend import (
    Backend,
    CpuKernels,
    LinearSpec,
    PlainTorch,
    TritonIntegers,
    backend_for,
    plan_search,
)
from foretoken.control.adaptive.allocation import allocate
from foretoken.kernels.allocating import AllocationKernel
from foretoken.kernels.library import find_library
from foretoken.ops.attention import Geometry
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


def test_a_gpu_takes_floats_and_other_types_as_pytorch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What of a GPU's backend needs no GPU: only integers, in types that Triton takes, are its."""
    monkeypatch.setattr(backends_module, "has_triton", lambda: True)
    gpu = backend_for.__wrapped__(torch.device("cuda"))
    assert isinstance(gpu, TritonIntegers) and gpu.holds_integers
    assert gpu.rows(normal(1, 2, 3)) is None
    monkeypatch.setattr(backends_module, "has_triton", lambda: False)
    assert isinstance(backend_for.__wrapped__(torch.device("cuda")), PlainTorch)
    integers, plain = TritonIntegers(CPU), PlainTorch(CPU)
    floats = LinearSpec(weights=normal(1, 8, 32), dtype=torch.float32)
    rounded = replace(floats, dtype=torch.float64, quantization="int8")
    for spec in (floats, rounded):
        x_TK = normal(2, 3, 32).to(spec.dtype)
        assert torch.equal(integers.linear(spec)(x_TK), plain.linear(spec)(x_TK))
    geometry = Geometry(
        num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32, device=CPU
    )
    for invariant in (False, True):
        found = integers.attention(geometry, batch_invariant=invariant)
        assert type(found) is type(plain.attention(geometry, batch_invariant=invariant))


def test_a_gpu_says_that_it_multiplies_integers_out(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(backends_module, "say_which", lambda: told.append(True))
    spec = LinearSpec(weights=normal(1, 8, 32), dtype=torch.float32, quantization="int8")
    x_TK = normal(2, 3, 32)
    found = PlainTorch(torch.device("cuda")).linear(spec)
    assert told == [True]
    torch.testing.assert_close(found(x_TK), PlainTorch(CPU).linear(spec)(x_TK))


def test_plans_are_searched_for_in_c_where_there_are_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if find_library() is not None:
        assert isinstance(plan_search(), AllocationKernel)
    monkeypatch.setattr(backends_module, "find_library", lambda: None)
    assert plan_search() is allocate
