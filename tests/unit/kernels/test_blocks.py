"""Block types of GGUF: their weights are the file's, and products of them the same everywhere."""

from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.kernels.linear import pack_block_rows
from foretoken.ops.linear import KernelLinear
from foretoken.quant.blocks import _FLOATS, BlockWeights
from foretoken.shape.block_kinds import BLOCK_KINDS
from tests.marks import KERNEL_LEVELS, level_of

LIBRARY = find_library()
needs_kernels = pytest.mark.skipif(LIBRARY is None, reason="no kernels")
KINDS = list(BLOCK_KINDS)


def blocks(kind: str, rows: int, inputs: int, seed: int = 0) -> Tensor:
    """Random bytes with scales that are usual ones, uint8 [rows, bytes]."""
    one = BLOCK_KINDS[kind]
    rng = np.random.default_rng(seed)
    count = rows * inputs // one.inputs
    made = rng.integers(0, 256, (count, one.num_bytes), dtype=np.uint8)
    for at in _FLOATS.get(kind, (0,)):
        scales = rng.normal(0, 0.01, count).astype(np.float16)
        made[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind == "MXFP4":
        made[:, 0] = rng.integers(110, 134, count)
    return torch.from_numpy(made.reshape(rows, -1))


def by_package(kind: str, rows_NB: Tensor) -> Tensor:
    found = dequantize(rows_NB.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(found))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_of_the_package(kind: str) -> None:
    rows_NB = blocks(kind, 40, 512)
    assert torch.equal(BlockWeights.as_stored(kind, rows_NB).floats(), by_package(kind, rows_NB))


@pytest.mark.parametrize("kind", KINDS)
def test_integers_are_the_same_matrix(kind: str) -> None:
    """Rows and columns in another order, and a group whose scale is 0."""
    rows_NB = blocks(kind, 12, 512)
    if "_1" in kind or kind == "Q4_K":
        rows_NB[3, :2] = 0
    stored = BlockWeights.as_stored(kind, rows_NB).changed_rows(lambda rows: rows.flip(0))
    weights = stored.changed_columns(lambda columns: columns.roll(32, 0), 32)
    assert weights is not None
    found = weights.integers()
    assert found.bits == (4 if kind in ("Q4_1", "Q4_K") else 8)
    assert found.values_NK.dtype == (torch.uint8 if found.bits == 4 else torch.int8)
    floats = found.dequantized(torch.float32)
    torch.testing.assert_close(floats, weights.floats(), rtol=3e-6, atol=1e-6)


def test_the_smallest_and_largest_powers() -> None:
    rows_NB = blocks("MXFP4", 16, 32)
    rows_NB[:, 0] = torch.tensor([0, 1, 2, 3, 127, 128, 249, 250] * 2)
    assert torch.equal(
        BlockWeights.as_stored("MXFP4", rows_NB).floats(), by_package("MXFP4", rows_NB)
    )


def linear_of(weights: BlockWeights, **more: Any) -> KernelLinear:
    assert LIBRARY is not None
    packed = pack_block_rows(LIBRARY, weights.rows())
    return KernelLinear(LIBRARY, packed, dtype=torch.float32, **more)


@pytest.fixture(params=KERNEL_LEVELS)
def at_level(request: pytest.FixtureRequest) -> Any:
    assert LIBRARY is not None
    before = LIBRARY.handle.ft_level()
    wanted = level_of(request.param, LIBRARY)
    if LIBRARY.handle.ft_set_level(wanted) != wanted:
        LIBRARY.handle.ft_set_level(before)
        pytest.skip("this processor has it not")
    yield request.param
    LIBRARY.handle.ft_set_level(before)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, at_level: str) -> None:
    """Near the product with the weights multiplied out: fixed point of 16 bits is all that parts
    them."""
    rows_NB = blocks(kind, 70, 768)
    x_TK = torch.randn(9, 768, generator=torch.Generator().manual_seed(1))
    wanted = x_TK.double() @ BlockWeights.as_stored(kind, rows_NB).floats().double().T
    found = linear_of(BlockWeights.as_stored(kind, rows_NB))(x_TK)
    assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x_bits", [16, 8])
def test_every_row_has_its_own_bits(kind: str, x_bits: int) -> None:
    """In any company, at any level."""
    assert LIBRARY is not None
    rows_NB = blocks(kind, 100, 1280, seed=3)
    with torch.inference_mode():  # matrices that share its memory are packed outside
        pack_block_rows(LIBRARY, BlockWeights.as_stored(kind, rows_NB).rows())
    packed = pack_block_rows(LIBRARY, BlockWeights.as_stored(kind, rows_NB).rows())
    layer = KernelLinear(LIBRARY, replace(packed, x_bits=x_bits), dtype=torch.float32)
    x_TK = torch.randn(150, 1280, generator=torch.Generator().manual_seed(2))
    before = LIBRARY.handle.ft_level()
    try:
        LIBRARY.handle.ft_set_level(0)
        wanted = layer(x_TK[:20])
        for level in range(1, before + 1):
            LIBRARY.handle.ft_set_level(level)
            assert torch.equal(layer(x_TK)[:20], wanted), level
            for rows in range(1, 9):
                assert torch.equal(layer(x_TK[4 : 4 + rows]), wanted[4 : 4 + rows]), (level, rows)
    finally:
        LIBRARY.handle.ft_set_level(before)


@needs_kernels
@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K", "MXFP4"])
def test_rows_and_columns_in_another_order(kind: str) -> None:
    rows_NB, more_NB = blocks(kind, 48, 768, seed=4), blocks(kind, 16, 768, seed=5)
    weights = BlockWeights.as_stored(kind, rows_NB).changed_rows(lambda rows: rows.flip(0))
    joined = weights.joined(BlockWeights.as_stored(kind, more_NB))
    assert joined is not None
    floats = torch.cat(
        [
            BlockWeights.as_stored(kind, rows_NB).floats().flip(0),
            BlockWeights.as_stored(kind, more_NB).floats(),
        ]
    )
    assert torch.equal(joined.floats(), floats)

    def turn(rows: Tensor) -> Tensor:
        turned: Tensor = rows.unflatten(0, (4, 3, 64)).transpose(0, 1).flatten(0, 2)
        return turned

    turned = joined.changed_columns(turn, 64)
    assert turned is not None
    turned_NK = floats.unflatten(1, (4, 3, 64)).transpose(1, 2).flatten(1)
    assert torch.equal(turned.floats(), turned_NK)
    x_TK = torch.randn(3, 768, generator=torch.Generator().manual_seed(1))
    wanted = x_TK @ turned_NK.T
    assert (linear_of(turned)(x_TK) - wanted).abs().max() < 2e-4 * wanted.abs().max()
