"""The attention kernel, on every instruction set of this machine. The guarded bugs: a key seen or
missed at a border of a block, section, window or page; a row whose bits depend on its neighbours,
the cut, the pages or the threads; a draft's ancestors taken for its siblings."""

import random
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.kernels.library import Library, find_library
from foretoken.ops.attention import Geometry, ReferenceAttention, SpanWindow
from foretoken.ops.attention.native import NativeAttention
from foretoken.ops.quantize_kv import dequantize, quantize_kv
from tests.marks import KERNEL_LEVELS, level_of

HEADS = [(4, 4, 16), (6, 2, 8), (5, 1, 10), (8, 4, 64), (6, 2, 32), (4, 2, 80), (2, 1, 128)]
KINDS = [(torch.float32, 1e-4, 2e-5), (torch.bfloat16, 2e-2, 2e-2)]
LENGTH = 1200


@pytest.fixture(scope="module", params=KERNEL_LEVELS)
def library(request: pytest.FixtureRequest) -> Iterator[Library]:
    found = find_library()
    level = level_of(request.param, found)
    if found is None or level > found.handle.ft_cpu_level():
        pytest.skip("no such kernels here")
    before = found.handle.ft_level()
    found.handle.ft_set_level(level)
    yield found
    found.handle.ft_set_level(before)


def geometry(heads: tuple[int, int, int], dtype: torch.dtype, page_size: int = 16) -> Geometry:
    return Geometry(
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2], page_size=page_size,
        dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip


class Text:
    """One sequence's queries and keys, and pages in disorder with NaN in every unused slot."""

    def __init__(self, shape: Geometry, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, size = shape, shape.page_size
        pages = -(-LENGTH // size)
        self.table = random.Random(seed).sample(range(2 * pages), pages)
        self.q_THh = torch.randn(LENGTH, shape.num_heads, shape.head_dim, generator=generator)
        self.q_THh = (2 * self.q_THh).to(shape.dtype)
        self.kv_TKh = torch.randn(LENGTH, 2 * shape.num_kv_heads, shape.head_dim)
        self.kv_TKh = self.kv_TKh.to(shape.dtype)
        self.store = torch.full((2 * pages * size, *self.kv_TKh.shape[1:]), torch.nan)
        self.store = self.store.to(shape.dtype)
        self.slots = [self.table[i // size] * size + i % size for i in range(LENGTH)]
        self.store[self.slots] = self.kv_TKh

    def span(self, start: int, count: int) -> SpanWindow:
        return SpanWindow(start, count, self.table[: -(-(start + count) // self.shape.page_size)])


def run(
    attention: object,
    texts: Sequence[Text],
    spans: Sequence[SpanWindow],
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Spans of texts that share a store."""
    assert isinstance(attention, NativeAttention | ReferenceAttention)
    pairs = zip(texts, spans, strict=True)
    q_THh = torch.cat([text.q_THh[span.start : span.end] for text, span in pairs])
    return attention.plan(spans)(q_THh, texts[0].store, sinks_H)


@pytest.mark.parametrize(("dtype", "rtol", "atol"), KINDS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_equals_the_definition(
    library: Library, heads: tuple[int, int, int], dtype: torch.dtype, rtol: float, atol: float
) -> None:
    draw = random.Random(str((heads, dtype)))
    for page_size in (1, 4, 16, 100):
        shape = geometry(heads, dtype, page_size)
        shape = replace(
            shape,
            window=draw.choice([None, 1, 64, 70, 600]),
            softcap=draw.choice([None, 3.0]),
            scale=draw.choice([None, 0.2]),
        )
        text = Text(shape)
        starts = [0, draw.choice([62, 63, 64, 65]), draw.choice([510, 511, 512, 700, 1100])]
        spans = [text.span(start, draw.choice([1, 2, 6, 7, 30])) for start in starts]
        sinks_H = draw.choice([None, 2 * torch.randn(shape.num_heads)])
        found = run(NativeAttention(shape, library), [text] * 3, spans, sinks_H)
        reference = ReferenceAttention(replace(shape, dtype=torch.float32))
        text.q_THh, text.store = text.q_THh.float(), text.store.float()
        expected = run(reference, [text] * 3, spans, sinks_H)
        torch.testing.assert_close(found.float(), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", [None, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_cut(
    library: Library, dtype: torch.dtype, window: int | None
) -> None:
    shape = replace(geometry((6, 2, 32), dtype), window=window)
    attention, text, draw = NativeAttention(shape, library), Text(shape), random.Random(3)
    sinks_H = None if window is None else torch.randn(6)
    alone = [run(attention, [text], [text.span(i, 1)], sinks_H) for i in range(LENGTH)]
    decoded = torch.cat(alone)
    for choices in ([LENGTH], [500, 130, 65], [1, 5, 6, 9]):
        library.handle.ft_set_threads(draw.choice([1, 2, 5]))
        at = 0
        while at < LENGTH:
            count = min(LENGTH - at, draw.choice(choices))
            found = run(attention, [text], [text.span(at, count)], sinks_H)
            assert torch.equal(found, decoded[at : at + count]), (at, count)
            at += count
    for _ in range(10):
        spans = [text.span(draw.randrange(LENGTH - 9), draw.randint(1, 9)) for _ in range(12)]
        expected = torch.cat([decoded[s.start : s.end] for s in spans])
        assert torch.equal(run(attention, [text] * 12, spans, sinks_H), expected)
    library.use_threads(library.cores)


def test_sinks(library: Library) -> None:
    """One that is far below changes nothing, one that is far above takes everything."""
    shape = geometry((8, 2, 64), torch.float32)
    attention, text = NativeAttention(shape, library), Text(shape)
    spans = [text.span(0, 70), text.span(1000, 6)]
    plain = run(attention, [text] * 2, spans)
    assert torch.equal(run(attention, [text] * 2, spans, torch.full((8,), -1e30)), plain)
    assert run(attention, [text] * 2, spans, torch.full((8,), 1e4)).abs().max() < 1e-30
    half = torch.full((8,), -1e30)
    half[5] = 1.0
    found = run(attention, [text] * 2, spans, half).view(-1, 8, 64)
    assert torch.equal(found[:, :5], plain.view(-1, 8, 64)[:, :5])
    assert not torch.equal(found[:, 5], plain.view(-1, 8, 64)[:, 5])


def test_bits_do_not_depend_on_the_pages(library: Library) -> None:
    outputs = []
    for page_size in (1, 3, 16, 64):
        shape = geometry((8, 2, 64), torch.bfloat16, page_size)
        torch.manual_seed(1)
        text = Text(shape)
        spans = [text.span(0, 70), text.span(1000, 6)]
        outputs.append(run(NativeAttention(shape, library), [text] * 2, spans))
    assert all(torch.equal(one, outputs[0]) for one in outputs)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("start", [0, 1, 57, 60, 64, 509, 700])
def test_a_draft_in_a_tree_has_the_bits_of_its_chain(
    library: Library, start: int, window: int | None
) -> None:
    shape = replace(geometry((6, 2, 32), torch.bfloat16), window=window, softcap=5.0)
    attention, text, draw = NativeAttention(shape, library), Text(shape), random.Random(start)
    paths: list[tuple[int, ...]] = [(0,)]
    for i in range(1, 20):
        paths.append((*draw.choice(paths), i))
    tree = replace(text.span(start, 20), paths=tuple(paths))
    found = run(attention, [text], [tree])
    expected = run(ReferenceAttention(shape), [text], [tree])
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    slots = text.slots[start:]
    for i, path in enumerate(paths):
        chain = text.store.clone()
        chain[slots[: len(path)]] = text.store[[slots[j] for j in path]]
        span = text.span(start + len(path) - 1, 1)
        row = attention.plan([span])(text.q_THh[start + i : start + i + 1], chain)
        assert torch.equal(row[0], found[i]), i


def test_queries_may_lie_anyhow(library: Library) -> None:
    shape = geometry((6, 2, 32), torch.bfloat16)
    attention, text = NativeAttention(shape, library), Text(shape)
    attend = attention.plan([text.span(90, 5)])
    q_THh = text.q_THh[90:95]
    expected = attend(q_THh, text.store)
    for order in ((0, 2, 1), (1, 0, 2), (2, 1, 0)):
        inner = [order.index(i) for i in range(3)]
        turned = q_THh.permute(order).contiguous().permute(inner)
        assert torch.equal(attend(turned, text.store), expected)
    padded = torch.zeros(5, 9, 32, dtype=shape.dtype)
    padded[:, 2:8] = q_THh
    assert torch.equal(attend(padded[:, 2:8], text.store), expected)


def in_int8(text: Text) -> tuple[Text, Text]:
    """The text with an int8 store, and with the same numbers multiplied out."""
    rounded, wide = copy(text), copy(text)
    kept_TKh = quantize_kv(text.kv_TKh, torch.int8)
    rounded.store = torch.full((*text.store.shape[:2], kept_TKh.shape[2]), -1, dtype=torch.int8)
    rounded.store[text.slots] = kept_TKh
    wide.store = text.store.clone()
    wide.store[text.slots] = dequantize(kept_TKh, text.shape.dtype)
    return rounded, wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_int8_has_the_bits_of_its_numbers_multiplied_out(
    library: Library, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Chains and trees, windows and caps, pages in disorder; unused slots hold NaN scales."""
    draw = random.Random(str((heads, dtype)))
    for page_size in (1, 16, 100):
        shape = geometry(heads, dtype, page_size)
        shape = replace(
            shape, window=draw.choice([None, 1, 70, 600]), softcap=draw.choice([None, 3.0])
        )
        rounded, wide = in_int8(Text(shape))
        paths: list[tuple[int, ...]] = [(0,)]
        for i in range(1, 9):
            paths.append((*draw.choice(paths), i))
        spans = [
            rounded.span(0, draw.choice([1, 2, 30])),
            rounded.span(draw.choice([63, 500, 511]), draw.choice([1, 6, 33])),
            rounded.span(1100, draw.choice([1, 6])),
            replace(rounded.span(draw.choice([60, 700]), 9), paths=tuple(paths)),
        ]
        attention = NativeAttention(replace(shape, kv_store_dtype=torch.int8), library)
        found = run(attention, [rounded] * 4, spans)
        assert torch.equal(found, run(NativeAttention(shape, library), [wide] * 4, spans))
        if page_size != 16:
            continue
        twin = ReferenceAttention(replace(shape, kv_store_dtype=torch.int8))
        expected = run(twin, [rounded] * 4, spans)
        assert torch.equal(expected, run(ReferenceAttention(shape), [wide] * 4, spans))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_nan_is_not_hidden(library: Library) -> None:
    """A key that is not a number makes every row that sees it so, and no span that ends before."""
    shape = geometry((2, 1, 16), torch.bfloat16)
    text = Text(shape)
    text.store[text.slots[100]] = torch.nan
    found = run(NativeAttention(shape, library), [text] * 2, [text.span(96, 4), text.span(100, 4)])
    assert found.isnan().any(-1).tolist() == [False] * 4 + [True] * 4
