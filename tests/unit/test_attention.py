"""The fast attention equals the definition. The guarded bugs: a wrong mask or head order, keys of
another sequence or of a page's unused end, a row attributed to another token."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.ops.attention import Geometry, SpanWindow, torch_attention
from foretoken.ops.attention.base import Attention, contiguous_start
from foretoken.ops.attention.reference import ReferenceAttention
from foretoken.ops.attention.tiled import TiledAttention, Tiling
from foretoken.ops.attention.torch_sdpa import BranchAttention
from foretoken.ops.quantize_kv import dequantize, quantize_kv

NUM_PAGES = 96
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "narrow window": {"window": 3},
    "window": {"window": 40},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.7},
    "all": {"window": 17, "softcap": 3.0, "scale": 0.3},
}
HEADS = [(4, 4, 16), (6, 2, 8), (5, 1, 10), (8, 4, 64)]
TILINGS = [Tiling(0, 1), Tiling(8, 64), Tiling(4, 512), Tiling(8, 64, by_position=True)]


def geometry(
    heads: tuple[int, int, int], page_size: int, dtype: torch.dtype = torch.float32, **kind: Any
) -> Geometry:
    return Geometry(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], page_size=page_size,
        dtype=dtype, device=torch.device("cpu"), **kind,
    )  # fmt: skip


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


def by_hand(q_Hh: Tensor, kv_LKh: Tensor, shape: Geometry) -> Tensor:
    """One token's output in float64, head by head, from the formula."""
    out = []
    for head in range(shape.num_heads):
        key_head = head % shape.num_kv_heads
        keys_Lh, values_Lh = kv_LKh.double()[:, key_head :: shape.num_kv_heads].unbind(1)
        scores_L = keys_Lh @ q_Hh[head].double() * (shape.scale or shape.head_dim**-0.5)
        if shape.softcap is not None:
            scores_L = shape.softcap * (scores_L / shape.softcap).tanh()
        if shape.window is not None:
            scores_L[: -shape.window] = -torch.inf
        out.append(scores_L.softmax(0) @ values_Lh)
    return torch.cat(out).float()


@pytest.mark.parametrize("kind", KINDS)
def test_the_definition_is_the_formula(kind: str) -> None:
    shape = geometry((6, 2, 8), 4, **KINDS[kind])
    store, q_THh = random_store(shape), torch.randn(60, 6, 8)
    found = run(ReferenceAttention(shape), [SpanWindow(0, 60, list(range(15)))], q_THh, store)
    for position in (0, 1, 2, 3, 16, 17, 39, 40, 59):
        expected = by_hand(q_THh[position], store[: position + 1], shape)
        torch.testing.assert_close(found[position], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_definition(kind: str, tiling: Tiling) -> None:
    draw = random.Random(str((kind, tiling)))
    for page_size in (3, 16):
        shape = geometry((6, 2, 8), page_size, **KINDS[kind])
        store = random_store(shape)
        fast, reference = TiledAttention(shape, tiling), ReferenceAttention(shape)
        for count in (1, 1, 4):
            spans = random_spans(draw, page_size, count)
            q_THh = torch.randn(sum(span.num_tokens for span in spans), 6, 8)
            found, expected = (run(a, spans, q_THh, store) for a in (fast, reference))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_windows_that_begin_late(tiling: Tiling) -> None:
    """Sequences whose windows begin before, at and after multiples of the kernel's key block."""
    shape = geometry((4, 2, 8), 16, window=90)
    store, table = random_store(shape), list(range(NUM_PAGES))
    fast, reference = TiledAttention(shape, tiling), ReferenceAttention(shape)
    spans = [SpanWindow(s, n, table) for s, n in [(590, 30), (601, 1), (1100, 20), (700, 6)]]
    for chosen in ([spans[0]], [spans[1]], spans, spans[1:]):
        q_THh = torch.randn(sum(span.num_tokens for span in chosen), 4, 8)
        found, expected = (run(a, chosen, q_THh, store) for a in (fast, reference))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "all"])
@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_what_a_token_may_not_see_has_no_effect(tiling: Tiling, kind: str) -> None:
    """Every slot that no token of the spans may see is changed; no bit of the output is."""
    draw = random.Random(3)
    shape = geometry((6, 2, 8), 4, **KINDS[kind])
    fast = TiledAttention(shape, tiling)
    for count in (1, 1, 1, 1, 3, 6):
        spans = random_spans(draw, 4, count)
        total = sum(span.num_tokens for span in spans)
        q_THh, store = torch.randn(total, 6, 8), random_store(shape)
        expected = run(fast, spans, q_THh, store)
        unseen = torch.ones(store.shape[0], dtype=torch.bool)
        for span in spans:
            first = max(0, span.start + 1 - (shape.window or span.end))
            for position in range(first, span.end):
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
@pytest.mark.parametrize("kind", ["plain", "long window", "softcap", "all"])
def test_chosen_attention_keeps_bits_at_long_contexts(kind: str, dtype: torch.dtype) -> None:
    """Beyond what the choice has tried: other positions, other cuts."""
    kinds = {**KINDS, "long window": {"window": 600}}
    shape = geometry((6, 2, 8), 16, dtype, **kinds[kind])
    attention = backend_for(shape.device).attention(shape, batch_invariant=True)
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


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_int8_has_the_bits_of_its_numbers_multiplied_out(
    dtype: torch.dtype, tiling: Tiling
) -> None:
    draw = random.Random(str(tiling))
    for kind in ("plain", "all"):
        shape = geometry((6, 2, 8), 4, dtype, **KINDS[kind])
        kept = quantize_kv(random_store(shape), torch.int8)
        wide = dequantize(kept, dtype)
        rounded = replace(shape, kv_store_dtype=torch.int8)
        for count in (1, 1, 4):
            spans = random_spans(draw, 4, count)
            q_THh = torch.randn(sum(span.num_tokens for span in spans), 6, 8).to(dtype)
            found = run(TiledAttention(rounded, tiling), spans, q_THh, kept)
            assert torch.equal(found, run(TiledAttention(shape, tiling), spans, q_THh, wide))


def test_int8_is_probed_like_other_types() -> None:
    shape = geometry((4, 2, 16), 8, torch.bfloat16, kv_store_dtype=torch.int8)
    found = torch_attention(shape, batch_invariant=True)
    assert isinstance(found, BranchAttention | ReferenceAttention)


SHAPE = geometry((6, 2, 8), 8)


def random_tree(draw: random.Random, nodes: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Paths of a span of `length` committed tokens and a random tree after them."""
    paths = [tuple(range(i + 1)) for i in range(length)]
    for node in range(length, length + nodes):
        paths.append((*paths[draw.randint(length - 1, node - 1)], node))
    return tuple(paths)


def random_tree_spans(draw: random.Random, shape: Geometry) -> list[SpanWindow]:
    pages = list(range(96))
    draw.shuffle(pages)
    spans = []
    for i in range(3):
        table, start = pages[i * 30 : (i + 1) * 30], draw.randrange(180)
        if i == 1:
            spans.append(SpanWindow(start, draw.randint(1, 9), table))
        else:
            length, nodes = draw.randint(1, 3), draw.randint(1, 20)
            paths = random_tree(draw, nodes, length)
            spans.append(SpanWindow(start, length + nodes, table, paths))
    return spans


def queries(spans: list[SpanWindow], shape: Geometry) -> Tensor:
    rows = sum(span.num_tokens for span in spans)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, shape.num_heads, shape.head_dim, generator=generator)


def branchwise(shape: Geometry, tiling: Tiling) -> Attention:
    return BranchAttention(TiledAttention(shape, tiling), shape)


@pytest.mark.parametrize("tiling", TILINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_branches_equal_the_definition(kind: str, tiling: Tiling) -> None:
    shape = geometry((6, 2, 8), 8, **KINDS[kind])
    store, draw = random_store(shape), random.Random(kind)
    for _ in range(4):
        spans = random_tree_spans(draw, shape)
        q_THh = queries(spans, shape)
        found = branchwise(shape, tiling).plan(spans)(q_THh, store)
        expected = ReferenceAttention(shape).plan(spans)(q_THh, store)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tiling", [Tiling(8, 64), Tiling(8, 64, by_position=True), Tiling(8, 512)])
@pytest.mark.parametrize("page_size", [8, 24])
def test_a_node_has_the_bits_of_its_chain(page_size: int, tiling: Tiling) -> None:
    """Copying a branch to where a chain has it gives the very same output."""
    shape = replace(SHAPE, page_size=page_size)
    attention, store, draw = branchwise(shape, tiling), random_store(shape), random.Random(3)
    for _ in range(5):
        table = list(range(40))
        draw.shuffle(table)
        start, length, nodes = draw.randrange(150), draw.randint(1, 2), 12
        tree = SpanWindow(start, length + nodes, table, random_tree(draw, nodes, length))
        q_THh = queries([tree], shape)
        found = attention.plan([tree])(q_THh, store)
        assert tree.paths is not None
        slot = [table[p // page_size] * page_size + p % page_size for p in range(start + 20)]
        for row, path in enumerate(tree.paths):
            chain = store.clone()
            for depth, index in enumerate(path):
                chain[slot[start + depth]] = store[slot[start + index]]
            alone = SpanWindow(start + len(path) - 1, 1, table)
            one = attention.plan([alone])(q_THh[row : row + 1], chain)
            assert torch.equal(one[0], found[row]), (row, path)
