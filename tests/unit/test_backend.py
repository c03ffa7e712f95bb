"""What a device computes with. The guarded bugs: a head rounded below 8 bits, a backend that gives
another number than the reference, a type that the kernels do not take."""

import ctypes
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foretoken import backend as backends_module
from foretoken.backend import (
    Backend,
    CpuKernels,
    GpuSteps,
    LinearSpec,
    PlainTorch,
    TritonIntegers,
    backend_for,
    make_backend,
    plan_search,
)
from foretoken.control.adaptive.allocation import allocate
from foretoken.kernels.allocating import AllocationKernel
from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.ops.activation import ACTIVATIONS, Activation, gelu_tanh, silu
from foretoken.ops.attention import Geometry
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.ops.linear import KernelLinear, PlainLinear
from foretoken.proposers.heads.linears import HeadLinears, serve_linears
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
    """Where the probe fails, only integers, in types that Triton takes, are a GPU's own."""
    monkeypatch.setattr(backends_module, "has_triton", lambda: True)
    monkeypatch.setattr(backends_module, "_gpu_steps", lambda device: None)
    gpu = make_backend.__wrapped__(torch.device("cuda", 0))
    assert isinstance(gpu, TritonIntegers) and gpu.holds_integers
    assert gpu.rows(normal(1, 2, 3)) is None
    monkeypatch.setattr(backends_module, "has_triton", lambda: False)
    assert isinstance(make_backend.__wrapped__(torch.device("cuda", 0)), PlainTorch)
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


@pytest.mark.parametrize("why", [None, "products of 6 rows", RuntimeError("no such card")])
def test_a_gpu_records_steps_where_the_probe_passes(
    why: str | Exception | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else it runs PyTorch's operations, promises no bits, and says why."""

    def probe(kernels: TwinKernels, device: torch.device) -> str | None:
        if isinstance(why, Exception):
            raise why
        return why

    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    monkeypatch.setattr(backends_module, "has_triton", lambda: True)
    monkeypatch.setattr(backends_module, "why_bits_differ", probe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    module = SimpleNamespace(TritonKernels=lambda capability: TwinKernels())
    monkeypatch.setitem(sys.modules, "foretoken.kernels.triton.launches", module)
    with caplog.at_level(logging.INFO, logger="foretoken"):
        gpu = make_backend.__wrapped__(torch.device("cuda", 0))
    assert isinstance(gpu, TritonIntegers if why else GpuSteps)
    assert gpu.keeps_bits == (why is None)
    assert why is None or str(why) in caplog.text


def test_a_card_is_probed_once_whatever_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    probed = list[torch.device]()
    monkeypatch.setattr(backends_module, "has_triton", lambda: True)
    monkeypatch.setattr(backends_module, "_gpu_steps", probed.append)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    make_backend.cache_clear()
    try:
        found = [backend_for(torch.device(name)) for name in ("cuda", "cuda:1", "cuda")]
        assert found[0] is found[1] is found[2]
        assert backend_for(torch.device("cuda:0")) is not found[0]
    finally:
        make_backend.cache_clear()
    assert probed == [torch.device("cuda:1"), torch.device("cuda:0")]


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


def test_values() -> None:
    x = torch.tensor([-200.0, -3.0, -0.5, 0.0, 0.5, 3.0, 200.0])
    torch.testing.assert_close(silu(x), F.silu(x), rtol=1e-6, atol=1e-7)


def test_gelu_values() -> None:
    x = torch.cat([torch.linspace(-12, 12, 1001), torch.tensor([-300.0, 300.0])])
    expected = F.gelu(x.double(), approximate="tanh").float()
    torch.testing.assert_close(gelu_tanh(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("activate", ACTIVATIONS.values(), ids=ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [520, 1040])
def test_bits_do_not_depend_on_rows(width: int, dtype: torch.dtype, activate: Activation) -> None:
    """Two threads cut 33 rows in the middle of a row; plain float32 silu fails here."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    both = torch.randn(133, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    rows = torch.cat([activate(row[:, :width]) for row in both.split(1)])
    for count in (2, 33, 77, 133):
        assert torch.equal(activate(both[:count, :width]), rows[:count])
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_linear_is_exchanged(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ModuleList([nn.Linear(32, 40, bias=False)])).to(dtype)
    first, rest = net[0], net[1]
    assert isinstance(rest, nn.ModuleList)
    x = torch.randn(2, 3, 64, dtype=dtype)
    middle = first(x)
    expected = rest[0](middle)
    serve_linears(net)
    assert not any(isinstance(module, nn.Linear) for module in net.modules())
    found = rest[0](net[0](x))
    assert found.shape == (2, 3, 40) and found.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", ["int8", "int4"])
@torch.inference_mode()
def test_rounded_weights_are_those_of_the_scheme(name: str) -> None:
    """But logits are never made of fewer than 8 bits."""
    torch.manual_seed(0)
    body, top = nn.Linear(64, 32), nn.Linear(32, 40, bias=False)
    net = nn.Sequential(body, top)
    inner = round_weights(body.weight, scheme_of(name)).dequantized(torch.float32)
    last = round_weights(top.weight, scheme_of("int8")).dequantized(torch.float32)
    x = torch.randn(3, 64)
    expected = (x @ inner.T + body.bias) @ last.T
    serve_linears(net, [top], HeadLinears(name))
    torch.testing.assert_close(net(x), expected, atol=1e-3, rtol=1e-3)


@pytest.fixture
def store() -> FeatureStore:
    """Points 2, 5, 9 and the last, two values each, of eight slots."""
    store = FeatureStore((2, 5, 9, FINAL), 2, 8, dtype=torch.float32, device=torch.device("cpu"))
    store.slots_SF.copy_(torch.arange(64.0).view(8, 8))
    return store


def columns_of(store: FeatureStore, points: tuple[int, ...]) -> Tensor:
    """By the book: one point after another."""
    return torch.cat([store.slots_SF[:, store.columns[point]] for point in points], dim=-1)


@pytest.mark.parametrize(
    ("points", "beside"),
    [((2, 5, 9, FINAL), True), ((5, 9), True), ((FINAL,), True), ((2, 9), False), ((5, 2), False)],
)
def test_points_that_lie_side_by_side_are_read_where_they_lie(
    store: FeatureStore, points: tuple[int, ...], beside: bool
) -> None:
    view, wanted = FeatureView(store, points), columns_of(store, points)
    assert (view.rows_SF is not None) == beside
    if view.rows_SF is not None:
        assert torch.equal(view.rows_SF, wanted)
        assert view.rows_SF.data_ptr() == store.slots_SF[:, store.columns[points[0]]].data_ptr()
    slots_N = torch.tensor([6, 0, 3])
    for read, rows in ((view.read(slots_N), slots_N), (view.read(slice(2, 5)), slice(2, 5))):
        assert torch.equal(read, wanted[rows])
        assert read.is_contiguous()


@pytest.mark.parametrize("points", [(2, 5, 9, FINAL), (5, 9), (2, 9), (9, 2, FINAL)])
def test_what_a_kernel_gathers_is_what_is_read(
    store: FeatureStore, points: tuple[int, ...]
) -> None:
    """As `ft_gather_features` does, in bytes."""
    view, slot = FeatureView(store, points), 5
    told = view.in_c
    starts = (ctypes.c_int64 * told.num_pieces).from_address(told.pieces)
    row = b"".join(
        ctypes.string_at(told.slots + slot * told.stride + start, told.piece_bytes)
        for start in starts
    )
    assert row == view.read(slice(slot, slot + 1)).numpy().tobytes()
    assert (told.num_pieces == 1) == (view.rows_SF is not None)
    assert view.width == 2 * len(points)
