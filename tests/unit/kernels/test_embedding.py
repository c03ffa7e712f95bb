"""Rows of an embedding table: those of the table multiplied out, whatever it is packed as."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from foretoken.kernels.library import find_library
from foretoken.kernels.linear import Packed, pack_block_rows, pack_float
from foretoken.layers.embedding import Embedding
from foretoken.ops.linear import KernelLinear
from foretoken.quant import IntWeights
from foretoken.quant.blocks import _FLOATS, BlockWeights
from foretoken.quant.pieces import pack_integers
from foretoken.shape.block_kinds import BLOCK_KINDS
from tests.unit.kernels.test_blocks import blocks

LIBRARY = find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="no kernels")
TYPES = [torch.float32, torch.bfloat16]
ROWS, INPUTS = 70, 768


def embedding_of(packed: Packed, dtype: torch.dtype) -> Embedding:
    assert LIBRARY is not None
    return Embedding(KernelLinear(LIBRARY, packed, dtype=dtype, out_dtype=torch.float32))


def same(found: Embedding, wanted: Tensor) -> None:
    """All rows, and some in any order and shape, to the bit; -0 is not 0."""
    integer = torch.int32 if wanted.dtype == torch.float32 else torch.int16
    assert torch.equal(found.floats().view(integer), wanted.contiguous().view(integer))
    tokens = torch.tensor([[3, 69, 0], [16, 3, 41]])
    rows = found(tokens)
    assert rows.dtype == wanted.dtype and torch.equal(rows, wanted[tokens])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks(kind: str, dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    weights = BlockWeights.as_stored(kind, blocks(kind, ROWS, INPUTS))
    packed = pack_block_rows(LIBRARY, weights.rows())
    same(embedding_of(packed, dtype), weights.dequantized(dtype))


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_blocks_whose_inputs_are_in_another_order(kind: str) -> None:
    """Parts of a block then have numbers of their own."""
    assert LIBRARY is not None
    weights = BlockWeights.as_stored(kind, blocks(kind, ROWS, INPUTS)).changed_columns(
        lambda rows: rows.unflatten(0, (4, 3, 64)).transpose(0, 1).flatten(0, 2), 64
    )
    assert weights is not None
    packed = pack_block_rows(LIBRARY, weights.rows())
    same(embedding_of(packed, torch.float32), weights.floats())


def integers(bits: int, group: int, *, zeros: bool = False, few_bits: bool = True) -> IntWeights:
    """Random ones; scales that float16 has, or not."""
    generator = torch.Generator().manual_seed(bits + group)
    inputs = INPUTS if group else INPUTS + 5
    least, most = (-128, 128) if bits == 8 else (0, 16)
    values = torch.randint(least, most, (ROWS, inputs), generator=generator)
    count = inputs // group if group else 1
    scale = torch.randn(ROWS, count, generator=generator) / 100
    return IntWeights(
        bits=bits,
        values_NK=values.to(torch.int8 if bits == 8 else torch.uint8),
        scale_NG=scale.half().float() if few_bits else scale,
        zero_NG=torch.randint(0, 16, (ROWS, count), generator=generator).float() if zeros else None,
    )


INTEGERS: dict[str, Callable[[], IntWeights]] = {
    "int8": lambda: integers(8, 0),
    "int8 in groups": lambda: integers(8, 32),
    "int8 in groups, long scales": lambda: integers(8, 128, few_bits=False),
    "int4": lambda: integers(4, 32),
    "int4, long scales": lambda: integers(4, 64, few_bits=False),
    "int4, zero points": lambda: integers(4, 128, zeros=True),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("case", INTEGERS)
def test_integers(case: str, dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    weights = INTEGERS[case]()
    same(embedding_of(pack_integers(LIBRARY, weights), dtype), weights.dequantized(dtype))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("inputs", [64, 77])
def test_floats(inputs: int, dtype: torch.dtype) -> None:
    assert LIBRARY is not None
    table_VD = torch.randn(ROWS, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    same(embedding_of(pack_float(LIBRARY, table_VD), dtype), table_VD)
    plain = Embedding(table_VD)
    same(plain, table_VD)
    assert plain.floats() is table_VD and not plain.is_packed


def test_many_rows_at_once() -> None:
    """So many are shared among threads."""
    assert LIBRARY is not None
    weights = BlockWeights.as_stored("Q6_K", blocks("Q6_K", ROWS, INPUTS))
    found = embedding_of(pack_block_rows(LIBRARY, weights.rows()), torch.bfloat16)
    tokens = torch.randint(0, ROWS, (1001,), generator=torch.Generator().manual_seed(2))
    assert torch.equal(found(tokens), weights.dequantized(torch.bfloat16)[tokens])


@pytest.mark.parametrize("token", [-1, ROWS])
def test_a_token_that_is_not_there(token: int) -> None:
    assert LIBRARY is not None
    weights = BlockWeights.as_stored("Q4_K", blocks("Q4_K", ROWS, INPUTS))
    found = embedding_of(pack_block_rows(LIBRARY, weights.rows()), torch.float32)
    with pytest.raises(AssertionError, match=str(token)):
        found(torch.tensor([3, token]))


def test_whether_it_is_another_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert LIBRARY is not None
    monkeypatch.setattr("foretoken.layers.embedding._PIECE", 20 * INPUTS)
    weights = BlockWeights.as_stored("Q4_K", blocks("Q4_K", ROWS, INPUTS))
    found = embedding_of(pack_block_rows(LIBRARY, weights.rows()), torch.float32)
    other_VD = weights.floats()
    assert found.equals(other_VD) and Embedding(other_VD).equals(other_VD.clone())
    assert not found.equals(other_VD.bfloat16()) and not found.equals(other_VD[:-1])
    other_VD[-1, -1] += 1
    assert not found.equals(other_VD)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_numbers_that_are_none_are_counted(kind: str) -> None:
    """As many by the kernels as by PyTorch, in rows of any order."""
    rows_NB = blocks(kind, ROWS, INPUTS)
    size = BLOCK_KINDS[kind].num_bytes
    spoilt = 0
    for row, block in ((0, 0), (17, 1), (69, rows_NB.shape[1] // size - 1)):
        at = block * size
        if kind == "MXFP4":
            rows_NB[row, at], spoilt = 255, spoilt + 1
            continue
        for place in _FLOATS.get(kind, (0,)):
            rows_NB[row, at + place + 1], spoilt = 0x7C if row else 0xFE, spoilt + 1
    weights = BlockWeights.as_stored(kind, rows_NB).changed_rows(lambda rows: rows.flip(0))
    assert weights.strange_numbers(LIBRARY) == weights.strange_numbers() == spoilt
