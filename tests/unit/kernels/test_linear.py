"""Linear layers in C. The guarded bugs: a row whose bits depend on its neighbours, an output or
input lost at the edge of a panel, a stride ignored, an instruction set that computes otherwise."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foretoken.kernels.library import LEVELS, Library, find_library
from foretoken.kernels.linear import Packed, pack_float, pack_int4, pack_int8, stack_packed
from foretoken.ops.linear import KernelLinear
from tests.marks import KERNEL_LEVELS, level_of

SHAPES = [(1, 1), (16, 32), (17, 33), (64, 64), (100, 70), (130, 257), (192, 192), (333, 1031)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=KERNEL_LEVELS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = find_library()
    level = level_of(request.param, found)
    if found is None or level > LEVELS.index(found.level):
        pytest.skip("not on this machine")
    found.handle.ft_set_level(level)
    yield found
    found.handle.ft_set_level(LEVELS.index(found.level))


def randn(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))


def assert_rows_are_their_own(linear: KernelLinear, x_TK: Tensor, residual_TN: Tensor) -> None:
    """Any neighbours, any place, any number of threads."""
    library = find_library()
    assert library is not None
    count = x_TK.shape[0]
    library.handle.ft_set_threads(1)
    alone = [linear(x_TK[r : r + 1], residual_TN[r : r + 1]) for r in range(count)]
    expected = torch.cat(alone)
    draw = random.Random(count)
    for threads in (1, 3):
        library.handle.ft_set_threads(threads)
        assert torch.equal(linear(x_TK, residual_TN), expected)
        for _ in range(4):
            rows = draw.sample(range(count), draw.randint(1, count))
            assert torch.equal(linear(x_TK[rows], residual_TN[rows]), expected[rows])
    library.handle.ft_set_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_floating_weights(
    library: Library, outputs: int, inputs: int, gated: bool, dtype: torch.dtype
) -> None:
    rows = 1 + (outputs * 7 + inputs) % 120
    weight_NK = (randn(outputs * (1 + gated), inputs) / inputs**0.5).to(dtype)
    bias_N, x_TK = randn(weight_NK.shape[0]), randn(rows, inputs, seed=1).to(dtype)
    residual_TN = randn(rows, outputs, seed=2).to(dtype)
    packed = pack_float(library, weight_NK, gated=gated)
    linear = KernelLinear(library, packed, dtype=dtype, bias_N=bias_N)
    exact = F.linear(x_TK.double(), weight_NK.double(), bias_N.double())
    if gated:
        gate, up = exact.chunk(2, dim=1)
        exact = F.silu(gate) * up
    exact += residual_TN
    tolerance = 1e-5 if dtype == torch.float32 else 8e-3
    found = linear(x_TK, residual_TN)
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)
    assert_rows_are_their_own(linear, x_TK, residual_TN)


def example(library: Library, kind: str, outputs: int, inputs: int) -> Packed:
    """Random weights of a kind, floating or whole, with groups of 64."""
    if kind in ("float32", "bfloat16"):
        return pack_float(library, randn(outputs, inputs).to(getattr(torch, kind)))
    scale_NG = randn(outputs, inputs // 64, seed=2).abs()
    values = torch.randint(0, 16 if kind == "int4" else 255, (outputs, inputs))
    if kind == "int4":
        return pack_int4(library, values.to(torch.uint8), scale_NG)
    return pack_int8(library, (values - 127).to(torch.int8), scale_NG)


of_every_kind = pytest.mark.parametrize(
    ("kind", "x_bits"),
    [("float32", 16), ("bfloat16", 16), ("int8", 16), ("int4", 16), ("int8", 8), ("int4", 8)],
)


@of_every_kind
def test_many_rows_have_the_bits_of_few(library: Library, kind: str, x_bits: int) -> None:
    """From some rows on inputs lie chunk by chunk and several tiles share them."""
    packed = replace(example(library, kind, outputs=1100, inputs=640), x_bits=x_bits)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    linear = KernelLinear(library, packed, dtype=dtype, out_dtype=torch.float32)
    x_TK = randn(500, 640, seed=1).to(dtype)
    few = torch.cat([linear(rows) for rows in x_TK.split(7)])
    assert torch.equal(linear(x_TK), few)
    for count in (127, 128, 129, 241, 481):
        assert torch.equal(linear(x_TK[:count]), few[:count])
    assert torch.equal(linear(x_TK[::2]), few[::2])
    library.handle.ft_set_threads(3)
    assert torch.equal(linear(x_TK), few)
    library.handle.ft_set_threads(1)


@of_every_kind
def test_how_weights_are_fetched_changes_no_bits(library: Library, kind: str, x_bits: int) -> None:
    """Each way is code of its own; a processor takes one of them, by it few rows of 8 bits too."""
    packed = replace(example(library, kind, outputs=330, inputs=1280), x_bits=x_bits)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    linear = KernelLinear(library, packed, dtype=dtype)
    ways: dict[int, list[Tensor]] = {}
    try:
        for near in (0, 1):
            library.handle.ft_set_fetches_near(near)
            assert library.handle.ft_fetches_near() == near
            ways[near] = [linear(randn(rows, 1280).to(dtype)) for rows in (1, 2, 3, 4, 5, 40)]
    finally:
        library.handle.ft_set_fetches_near(-1)
    assert all(torch.equal(a, b) for a, b in zip(ways[0], ways[1], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_rows(library: Library, dtype: torch.dtype) -> None:
    weight_NK, wide = randn(40, 48).to(dtype), randn(9, 200, seed=1).to(dtype)
    linear = KernelLinear(library, pack_float(library, weight_NK), dtype=dtype)
    x_TK, residual_TN = wide[:, 3:51], wide[:, 100:140]
    expected = linear(x_TK.contiguous(), residual_TN.contiguous())
    assert torch.equal(linear(x_TK, residual_TN), expected)
    assert torch.equal(linear(x_TK[::2], residual_TN[::2]), expected[::2])
    columns = x_TK.T.contiguous().T
    assert torch.equal(linear(columns, residual_TN), expected)
    assert linear(x_TK[:0]).shape == (0, 40)


def test_float32_results_of_bfloat16_rows(library: Library) -> None:
    weight_NK, x_TK = randn(40, 64).bfloat16(), randn(5, 64, seed=1).bfloat16()
    packed = pack_float(library, weight_NK)
    wide = KernelLinear(library, packed, dtype=torch.bfloat16, out_dtype=torch.float32)(x_TK)
    assert torch.equal(wide.bfloat16(), KernelLinear(library, packed, dtype=torch.bfloat16)(x_TK))
    torch.testing.assert_close(wide, x_TK.float() @ weight_NK.float().T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_before_is_norm_then_linear(library: Library, dtype: torch.dtype) -> None:
    weight_NK, x_TK = randn(50, 77).to(dtype), randn(9, 77, seed=1).to(dtype) * 3
    gain_K = randn(77, seed=2)
    packed = pack_float(library, weight_NK)
    fused = KernelLinear(library, packed, dtype=dtype, norm=(gain_K, 1e-5))(x_TK)
    wide = x_TK.double()
    normed = wide / (wide.pow(2).mean(1, keepdim=True) + 1e-5).sqrt() * gain_K.double()
    expected = KernelLinear(library, packed, dtype=dtype)(normed.to(dtype))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(fused, expected, rtol=tolerance, atol=tolerance)


LIMITS = {16: 32639, 8: 127}
"""Bits of an activation in fixed point -> its largest whole number."""


def fixed_point(x_TK: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Rows in blocks of 128: whole numbers [T, B, 128] and scales [T, B], as native/linear.h."""
    blocks = F.pad(x_TK.float(), (0, -x_TK.shape[1] % 128)).unflatten(1, (-1, 128))
    most = blocks.abs().amax(2)
    inverse = torch.where(most > 0, torch.full_like(most, limit) / most, torch.zeros(()))
    return (blocks * inverse[..., None]).round().long(), most / limit


def exact_sum(
    x_TK: Tensor,
    values_NK: Tensor,
    scale_NG: Tensor,
    zero_NG: Tensor | None,
    middle: int,
    x_bits: int,
) -> Tensor:
    """What native/linear.h promises for integer weights, operation by operation."""
    fixed, x_scale = fixed_point(x_TK, LIMITS[x_bits])
    per_output = scale_NG.shape[1] == 1
    group = 128 if per_output else values_NK.shape[1] // scale_NG.shape[1]
    width = fixed.shape[1] * 128
    values = F.pad(values_NK.long() - middle, (0, width - values_NK.shape[1]))
    total = torch.zeros(x_TK.shape[0], values_NK.shape[0])
    for start in range(0, -(-values_NK.shape[1] // group) * group, group):
        part = fixed.flatten(1)[:, start : start + group]
        weights = values[:, start : start + group]
        if zero_NG is None:
            whole = (part @ weights.T).float()
        else:
            zero = zero_NG[:, start // group]
            whole = (part @ (weights + middle).T).float() - zero * part.sum(1).float()[:, None]
        term = whole * x_scale[:, start // 128, None]
        total += term if per_output else term * scale_NG[:, start // group]
    return total * scale_NG[:, 0] if per_output else total


def integer_weights(
    library: Library, bits: int, group: int, asymmetric: bool, gated: bool, halves: bool = False
) -> tuple[Packed, tuple[Tensor, Tensor, Tensor | None, int]]:
    """With `halves` scales and zero points are such that float16 holds them."""
    outputs, inputs = 86 * (1 + gated), group * 5 if group else 333
    generator = torch.Generator().manual_seed(bits + group)
    scale_NG = torch.rand(outputs, inputs // group if group else 1, generator=generator) / 50
    if halves:
        scale_NG[::7] *= 2.0**-14  # below its normal numbers
        scale_NG = scale_NG.half().float()
        scale_NG[5], scale_NG[6] = 0.0, -scale_NG[6]
    if bits == 8:
        values = torch.randint(-128, 128, (outputs, inputs), generator=generator)
        packed = pack_int8(library, values.to(torch.int8), scale_NG, gated=gated)
        return packed, (values, scale_NG, None, 0)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator)
    zero = torch.randint(0, 17, scale_NG.shape, generator=generator).float() + 0.25
    chosen = zero if asymmetric else None
    packed = pack_int4(library, values.to(torch.uint8), scale_NG, chosen, gated=gated)
    return packed, (values, scale_NG, chosen, 0 if asymmetric else 8)


@pytest.mark.parametrize("x_bits", LIMITS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("bits", "group", "asymmetric"),
    [(8, 0, False), (8, 32, False), (8, 128, False)]
    + [(4, group, asymmetric) for group in (32, 64, 128) for asymmetric in (False, True)],
)
def test_integer_weights_bit_for_bit(
    library: Library, bits: int, group: int, asymmetric: bool, gated: bool, x_bits: int
) -> None:
    for halves in (False, True) if group else (False,):
        packed, matrix = integer_weights(library, bits, group, asymmetric, gated, halves)
        assert packed.halves == halves
        assert_bit_for_bit(replace(packed, x_bits=x_bits), matrix, library)


def assert_bit_for_bit(
    packed: Packed, matrix: tuple[Tensor, Tensor, Tensor | None, int], library: Library
) -> None:
    values, scale, zero, middle = matrix
    x_TK = randn(29, packed.inputs) * torch.logspace(-3, 3, 29)[:, None]
    x_TK[3] = 0
    linear = KernelLinear(library, packed, dtype=torch.float32)
    expected = exact_sum(x_TK, values, scale, zero, middle, packed.x_bits)
    residual_TN = torch.zeros(29, 86)
    if packed.gated:
        gate, up = expected.chunk(2, dim=1)
        torch.testing.assert_close(linear(x_TK), F.silu(gate) * up, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(linear(x_TK), expected)
    assert_rows_are_their_own(linear, x_TK, residual_TN)


def test_pieces_that_need_more_bits_for_their_scales(library: Library) -> None:
    """Whichever comes first: the whole has those of the piece that needs most."""
    values = torch.randint(0, 16, (48, 64)).to(torch.uint8)
    scale_NG = (torch.rand(48, 2) / 50).half().float()
    scale_NG[20, 1] = 1e-3 / 3
    whole = pack_int4(library, values, scale_NG)
    pieces = [pack_int4(library, values[i : i + 16], scale_NG[i : i + 16]) for i in (0, 16, 32)]
    assert [piece.halves for piece in pieces] == [True, False, True] and not whole.halves
    for order in ((0, 1, 2), (1, 0, 2)):
        stacked = stack_packed(library, (pieces[i] for i in order), 48)
        assert whole.scale is not None and stacked.scale is not None and not stacked.halves
        assert torch.equal(stacked.scale, whole.scale[list(order)])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("x_bits", LIMITS)
def test_nothing_saturates(library: Library, bits: int, x_bits: int) -> None:
    """The largest products of one sign, in either direction, which sums of 16 bits do not hold."""
    low, high = (-128, 127) if bits == 8 else (0, 15)
    values = torch.full((32, 256), high)
    values[::2] = low
    scale_NG = torch.ones(32, 1 if bits == 8 else 8)
    if bits == 8:
        packed = pack_int8(library, values.to(torch.int8), scale_NG)
    else:
        packed = pack_int4(library, values.to(torch.uint8), scale_NG)
    x_TK = torch.ones(4, 256)
    x_TK[1::2] = -1
    linear = KernelLinear(library, replace(packed, x_bits=x_bits), dtype=torch.float32)
    expected = exact_sum(x_TK, values, scale_NG, None, 0 if bits == 8 else 8, x_bits)
    assert torch.equal(linear(x_TK), expected)


@pytest.mark.parametrize("x_bits", LIMITS)
def test_what_is_not_a_number_stays_so(library: Library, x_bits: int) -> None:
    packed, _ = integer_weights(library, 8, 0, False, False)
    linear = KernelLinear(library, replace(packed, x_bits=x_bits), dtype=torch.float32)
    x_TK = randn(3, packed.inputs)
    x_TK[0, 5], x_TK[1, 7] = float("nan"), float("inf")
    found = linear(x_TK)
    assert found[:2].isnan().all()
    assert found[2].isfinite().all()
