"""Rows keep their bits. The guarded bug: an invariant layer that lets its kernel see a number of
rows outside the class that was measured, or loses, adds or reorders rows on the way."""

import random

import pytest
import torch
from torch import Tensor

from foretoken.backend import LinearSpec, backend_for
from foretoken.ops.linear import (
    InvariantLinear,
    Linear,
    PackedLinear,
    PlainLinear,
    RowClass,
    RowProbe,
    can_pack,
)


class MoodyLinear(Linear):
    """A kernel whose last bits change below `low` and above `high` rows; notes what it is given."""

    def __init__(self, weight_NK: Tensor, low: int, high: int) -> None:
        self._plain = PlainLinear(weight_NK.double())
        self._low, self._high = low, high
        self.seen: list[int] = []

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        rows = x_TK.shape[0]
        self.seen.append(rows)
        exact = self._plain(x_TK.double()).float()
        if residual_TN is not None:
            exact = exact.add(residual_TN)
        moody: Tensor = exact if self._low <= rows <= self._high else exact * (1 + 2**-20)
        return moody


def weights(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(outputs + inputs)
    return torch.randn(outputs, inputs, generator=generator).div(inputs**0.5).to(dtype)


@pytest.mark.parametrize(("low", "high"), [(1, 10_000), (2, 10_000), (5, 70), (32, 32), (32, 50)])
def test_probe_finds_a_class_inside_the_true_one(low: int, high: int) -> None:
    weight_NK = weights(24, 16)
    found = RowProbe().row_class(MoodyLinear(weight_NK, low, high), weight_NK)
    assert low <= found.min_rows <= 32 <= found.max_rows <= high
    assert found.min_rows == low
    assert found.max_rows > 32 or high < 64


class HalvedLinear(Linear):
    """Adds up one row in two halves, and more rows in one go; results have 16 bits."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None) -> None:
        self._weight_KN = weight_NK.float().T
        self._bias_N = torch.zeros(len(weight_NK)) if bias_N is None else bias_N.float()

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        weight_KN, x_TK1 = self._weight_KN, x_TK.float()[:, :, None]
        # In order, term by term: what is compared must not depend on a library.
        cut = weight_KN.shape[0] // 2 if x_TK.shape[0] == 1 else weight_KN.shape[0]
        sums = [torch.zeros(x_TK.shape[0], weight_KN.shape[1]) for _ in range(2)]
        for k, column_N in enumerate(weight_KN):
            sums[k >= cut].add_(x_TK1[:, k] * column_N)
        found = sums[0] + sums[1] + self._bias_N
        return (found if residual_TN is None else found + residual_TN).to(x_TK.dtype)


@pytest.mark.parametrize("adds", ["nothing", "residual", "bias", "both"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_probe_sees_another_order_of_few_sums(dtype: torch.dtype, adds: str) -> None:
    """Of results of 16 bits, hardly one in thousands changes where numbers are drawn at random."""
    weight_NK = weights(8, 40, dtype)
    bias_N = weights(8, 1, dtype)[:, 0] if adds in ("bias", "both") else None
    residual = adds in ("residual", "both")
    found = RowProbe().row_class(
        HalvedLinear(weight_NK, bias_N), weight_NK, adds_residual=residual, bias_N=bias_N
    )
    assert found.min_rows == 2


class ExactLinear(Linear):
    """A row after the other, so that no number of rows changes a bit."""

    def __init__(self, weight_NK: Tensor, bias_N: Tensor) -> None:
        self._weight_NK, self._bias_N = weight_NK.double(), bias_N.double()

    def __call__(self, x_TK: Tensor, residual_TN: Tensor | None = None) -> Tensor:
        rows = [self._weight_NK @ x_K + self._bias_N for x_K in x_TK.double()]
        return torch.stack(rows).to(x_TK.dtype)


@pytest.mark.parametrize("least", [0.0, 2.0**-24])
def test_probe_stays_among_numbers_where_weights_are_next_to_nothing(least: float) -> None:
    weight_NK, bias_N = weights(8, 40, torch.float16), torch.ones(8, dtype=torch.float16)
    weight_NK[3] = least
    found = RowProbe().row_class(ExactLinear(weight_NK, bias_N), weight_NK, bias_N=bias_N)
    assert (found.min_rows, found.max_rows) == (1, 256)


def test_probe_measures_each_shape_once() -> None:
    weight_NK, probe = weights(24, 16), RowProbe()
    first, second = MoodyLinear(weight_NK, 1, 99), MoodyLinear(weight_NK, 1, 99)
    assert probe.row_class(first, weight_NK) == probe.row_class(second, weight_NK)
    assert first.seen
    assert not second.seen


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 32, 33, 64, 65, 100, 300])
@pytest.mark.parametrize("limits", [RowClass(1, 64), RowClass(5, 64), RowClass(32, 32)])
def test_kernel_only_sees_its_class(rows: int, limits: RowClass) -> None:
    weight_NK = weights(24, 16)
    kernel = MoodyLinear(weight_NK, limits.min_rows, limits.max_rows)
    x_TK = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
    found = InvariantLinear(kernel, limits)(x_TK)
    assert all(limits.min_rows <= seen <= limits.max_rows for seen in kernel.seen)
    assert torch.equal(found, PlainLinear(weight_NK.double())(x_TK.double()).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("adds", ["nothing", "residual", "bias", "both"])
@pytest.mark.parametrize(("outputs", "inputs"), [(40, 48), (130, 768)])
def test_real_kernels_keep_bits(outputs: int, inputs: int, adds: str, dtype: torch.dtype) -> None:
    weight_NK, residual = weights(outputs, inputs, dtype), adds in ("residual", "both")
    bias_N = weights(outputs, 1, dtype)[:, 0] if adds in ("bias", "both") else None
    linear = backend_for(weight_NK.device).linear(
        LinearSpec(
            weights=weight_NK, dtype=dtype, bias_N=bias_N, adds_residual=residual, probe=RowProbe()
        )
    )
    adding = torch.randn(400, outputs, generator=torch.Generator().manual_seed(2)).to(dtype)

    def apply(rows: slice | Tensor) -> Tensor:
        return linear(x_TK[rows], adding[rows] if residual else None)

    x_TK = torch.randn(400, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.cat([apply(slice(row, row + 1)) for row in range(400)])
    draw, order = random.Random(0), torch.randperm(400)
    assert torch.equal(apply(slice(0, 400)), expected)
    assert torch.equal(apply(order), expected[order])
    for _ in range(20):
        start, count = draw.randrange(300), draw.randint(2, 100)
        found = apply(slice(start, start + count))
        assert torch.equal(found, expected[start : start + count]), (start, count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_is_close_to_plain(dtype: torch.dtype) -> None:
    weight_NK = weights(70, 90, dtype)
    if not can_pack(weight_NK):
        pytest.skip("oneDNN does not pack this type here")
    x_TK = torch.randn(7, 90, generator=torch.Generator().manual_seed(2)).to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    for bias_N in (None, weights(70, 1, dtype)[:, 0]):
        found, expected = (kind(weight_NK, bias_N)(x_TK) for kind in (PackedLinear, PlainLinear))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert bias_N is not None
    plain = (x_TK.double() @ weight_NK.double().T + bias_N.double()).to(dtype)
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)


def test_half_precision_takes_the_plain_path() -> None:
    half = LinearSpec(weights=weights(8, 8, torch.float16), dtype=torch.float16)
    linear = backend_for(torch.device("cpu")).linear(half)
    assert isinstance(linear, PlainLinear)
