"""The fast attention equals the definition. The guarded bugs: a wrong mask or head order, keys of
another sequence or of a page's unused end, a row attributed to another token."""

import random

import pytest
import torch
from torch import Tensor

from foretoken.ops.attention import Geometry, SpanWindow
from foretoken.ops.attention.base import Attention, contiguous_start
from foretoken.ops.attention.choose import choose_attention
from foretoken.ops.attention.reference import ReferenceAttention
from foretoken.ops.attention.tiled import TiledAttention, Tiling

NUM_PAGES = 96
HEADS = [(4, 4, 16), (6, 2, 8), (5, 1, 10), (8, 4, 64)]
TILINGS = [Tiling(0, 1), Tiling(8, 64), Tiling(4, 512), Tiling(8, 64, by_position=True)]


def geometry(
    heads: tuple[int, int, int], page_size: int, dtype: torch.dtype = torch.float32
) -> Geometry:
    return Geometry(
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=heads[2],
        page_size=page_size,
        dtype=dtype,
        device=torch.device("cpu"),
    )


def random_store(shape: Geometry) -> Tensor:
    slots = NUM_PAGES * shape.page_size + 1024
    generator = torch.Generator().manual_seed(0)
    store = torch.randn(slots, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    return (store * 3).to(shape.dtype)


def random_spans(draw: random.Random, page_size: int, count: int) -> list[SpanWindow]:
    """Spans of disjoint sequences, some in scattered pages."""
    pages = list(range(NUM_PAGES))
    if draw.random() < 0.6:
        draw.shuffle(pages)
    share = NUM_PAGES // count
    spans = []
    for i in range(count):
        table = pages[i * share : (i + 1) * share]
        room = share * page_size
        length = min(draw.choice([1, 1, 2, 6, 8, 9, 40]), room)
        start = draw.randint(0, room - length)
        spans.append(SpanWindow(start, length, table[: -(-(start + length) // page_size)]))
    return spans


def run(attention: Attention, spans: list[SpanWindow], q_THh: Tensor, store: Tensor) -> Tensor:
    with torch.inference_mode():
        return attention.plan(spans)(q_THh, store)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_definition(heads: tuple[int, int, int], tiling: Tiling) -> None:
    draw = random.Random(str((heads, tiling)))
    for page_size in (1, 4, 16):
        shape = geometry(heads, page_size)
        store = random_store(shape)
        fast, reference = TiledAttention(shape, tiling), ReferenceAttention(shape)
        for count in (1, 1, 1, 2, 5):
            spans = random_spans(draw, page_size, count)
            total = sum(span.num_tokens for span in spans)
            q_THh = torch.randn(total, heads[0], heads[2])
            found = run(fast, spans, q_THh, store)
            expected = run(reference, spans, q_THh, store)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_what_a_token_may_not_see_has_no_effect(tiling: Tiling) -> None:
    """Every slot that no token of the spans may see is changed; no bit of the output is."""
    draw = random.Random(3)
    shape = geometry((6, 2, 8), 4)
    fast = TiledAttention(shape, tiling)
    for count in (1, 1, 1, 1, 3, 6):
        spans = random_spans(draw, 4, count)
        total = sum(span.num_tokens for span in spans)
        q_THh, store = torch.randn(total, 6, 8), random_store(shape)
        expected = run(fast, spans, q_THh, store)
        unseen = torch.ones(store.shape[0], dtype=torch.bool)
        for span in spans:
            for position in range(span.end):
                unseen[span.page_table[position // 4] * 4 + position % 4] = False
        store[unseen] = 1000.0
        assert torch.equal(run(fast, spans, q_THh, store), expected)


def test_a_single_key() -> None:
    """The first token sees itself only: its value comes back."""
    shape = geometry((4, 2, 8), 4)
    store = random_store(shape)
    for attention in (ReferenceAttention(shape), TiledAttention(shape, Tiling(0, 1))):
        found = run(attention, [SpanWindow(0, 1, [5])], torch.randn(1, 4, 8), store)
        value_Kh = store[20, 2:]
        expected = value_Kh.repeat(2, 1).reshape(1, -1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_attention_keeps_bits_at_long_contexts(dtype: torch.dtype) -> None:
    """Beyond what the choice has tried: other positions, other cuts."""
    shape = geometry((6, 2, 8), 16, dtype)
    attention = choose_attention(shape, batch_invariant=True)
    store, table = random_store(shape), list(range(NUM_PAGES))
    length, draw = NUM_PAGES * 16, random.Random(4)
    q_THh = torch.randn(length, 6, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    whole = run(attention, [SpanWindow(0, length, table)], q_THh, store)
    for _ in range(40):
        count = draw.choice([1, 1, 2, 5, 7, 30])
        start = draw.randrange(length - count)
        rows = slice(start, start + count)
        found = run(attention, [SpanWindow(start, count, table)], q_THh[rows], store)
        assert torch.equal(found, whole[rows]), (start, count)


@pytest.mark.parametrize(
    ("table", "count", "expected"),
    [([3], 1, 3), ([3, 4, 5], 3, 3), ([3, 4, 9], 2, 3), ([3, 5, 4, 6], 4, None), ([4, 3], 2, None)],
)
def test_contiguous_start(table: list[int], count: int, expected: int | None) -> None:
    assert contiguous_start(table, count) == expected
