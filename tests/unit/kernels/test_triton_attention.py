"""Attention by Triton's kernels, in the interpreter or on a GPU. The guarded bugs: a key that is
seen by a row that must not, a split or a page lost, a row whose bits depend on its neighbours, on
where its span begins or on the tree around it."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import AttentionCall, AttentionInts, KVLayer, Partials
from foretoken.ops.attention import Geometry, ReferenceAttention, SpanWindow
from foretoken.ops.attention.gpu import GpuAttention, attention_shape, plan_rows, run_attention
from foretoken.ops.quantize_kv import quantize_kv
from tests.unit.kernels.triton_harness import DEVICE, normal, runs, tensor_cores, triton_kernels

pytestmark = [runs, pytest.mark.usefixtures("tensor_cores")]
__all__ = ["tensor_cores"]
PAGE, HEADS, GROUP, SIZE = 16, 2, 3, 32
"""A group of queries that does not fill a tile."""
TREE = ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 2, 4), (0, 1, 3, 5))


def geometry(dtype: torch.dtype = torch.float32, **more: Any) -> Geometry:
    return Geometry(
        num_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=SIZE,
        page_size=PAGE,
        dtype=dtype,
        device=DEVICE,
        **more,
    )


def shuffled(pages: int) -> list[int]:
    order = list(range(pages))
    random.Random(1).shuffle(order)
    return order


def attended(
    spans: list[SpanWindow], q: Tensor, kv: Tensor, made: Geometry, tile: int = 16
) -> Tensor:
    return GpuAttention(made, triton_kernels(split=128, tile=tile)).plan(spans)(q, kv)


@pytest.mark.parametrize(
    ("dtype", "window", "softcap", "stored"),
    [
        (torch.float32, 40, None, None),
        (torch.float32, None, 30.0, torch.int8),
        (torch.bfloat16, None, None, None),
        (torch.bfloat16, 150, 20.0, torch.int8),
        (torch.float16, 150, None, None),
    ],
)
def test_it_is_the_reference(
    dtype: torch.dtype, window: int | None, softcap: float | None, stored: torch.dtype | None
) -> None:
    """Chains and a tree in one call, within a split, at its edge and over several, pages mixed."""
    made = geometry(dtype, window=window, softcap=softcap, kv_store_dtype=stored)
    pages = shuffled(70)
    kv = quantize_kv(normal(0, 70 * PAGE, 2 * HEADS, SIZE).to(dtype), made.store_dtype)
    spans = [
        SpanWindow(0, 3, pages[:1]),
        SpanWindow(126, 4, pages[1:11]),
        SpanWindow(270, 1, pages[11:30]),
        SpanWindow(190, 6, pages[30:43], paths=TREE),
        SpanWindow(61, 11, pages[43:48]),
        SpanWindow(252, 4, pages[50:70], paths=((0,), (0, 1), (0, 2), (0, 1, 3))),
    ]
    q = normal(1, sum(span.num_tokens for span in spans), HEADS * GROUP, SIZE).to(dtype)
    found = attended(spans, q, kv, made, tile=32)
    wanted = ReferenceAttention(made).plan(spans)(q, kv)
    near = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(found, wanted, rtol=near, atol=near)


def test_a_rows_bits_are_its_own() -> None:
    """One by one, in chunks, in a prompt, in tiles of other sizes, beside others; also where all
    rows end in the first split, and nothing is left to combine. Pages that no window sees any more
    may hold what is no number."""
    made, pages = geometry(window=100), shuffled(10)
    kv, q = normal(0, 10 * PAGE, 2 * HEADS, SIZE), normal(1, 24, HEADS * GROUP, SIZE)
    first = 116
    for page in (pages[0], pages[9]):
        kv[page * PAGE : (page + 1) * PAGE] = torch.nan
    together = attended([SpanWindow(first, 24, pages)], q, kv, made, tile=64)
    alone = [
        attended([SpanWindow(first + at, 1, pages)], q[at : at + 1], kv, made)
        for at in (*range(10, 14), 23)
    ]
    assert torch.equal(torch.cat(alone), together[[*range(10, 14), 23]])
    chunks = [SpanWindow(first, 7, pages), SpanWindow(first + 7, 17, pages)]
    assert torch.equal(attended(chunks, q, kv, made, tile=32), together)
    within = [SpanWindow(first, 12, pages)]
    assert torch.equal(attended(within, q[:12], kv, made), together[:12])


@pytest.mark.parametrize("start", [45, 126])
def test_a_node_has_the_bits_of_its_chain(start: int) -> None:
    """Also where branches reach into the next split."""
    made, pages = geometry(), shuffled(10)
    kv, q = normal(0, 10 * PAGE, 2 * HEADS, SIZE), normal(1, 6, HEADS * GROUP, SIZE)
    tree = attended([SpanWindow(start, 6, pages, paths=TREE)], q, kv, made, tile=32)

    def slot(place: int) -> int:
        return pages[place // PAGE] * PAGE + place % PAGE

    for node in (1, 4, 5):
        path, chain = TREE[node], kv.clone()
        for depth, index in enumerate(path):
            chain[slot(start + depth)] = kv[slot(start + index)]
        last = SpanWindow(start + len(path) - 1, 1, pages)
        assert torch.equal(attended([last], q[node : node + 1], chain, made)[0], tree[node])


@pytest.mark.parametrize("window", [None, 40])
def test_rows_of_a_block_see_all_of_it(window: int | None) -> None:
    """Within the first split and over its edge; windows are those of each row."""
    made, pages = geometry(window=window), shuffled(14)
    spans = [SpanWindow(125, 6, pages[:9]), SpanWindow(30, 5, pages[9:])]
    kernels: Any = triton_kernels(split=128, tile=32)
    shape = attention_shape(made)
    plan = plan_rows(spans, kernels, shape, 1 << 15, whole=True)
    ints = {
        name: torch.from_numpy(getattr(plan, name)).to(DEVICE)
        for name in AttentionInts._fields
        if name not in ("trees", "splits")
    }
    step = AttentionInts(**ints, trees=False, splits=plan.splits)
    kv, q = normal(0, 14 * PAGE, 2 * HEADS, SIZE), normal(1, 11, HEADS * GROUP, SIZE)
    out, partials = torch.zeros(11, HEADS * GROUP * SIZE, device=DEVICE), plan.partials
    room = Partials.empty(partials, shape, DEVICE)
    run_attention(kernels, AttentionCall(q, KVLayer(kv), shape, step, room, out), plan.pieces)
    row = 0
    for span in spans:
        slots = [span.page_table[at // PAGE] * PAGE + at % PAGE for at in range(span.end)]
        keys, values = kv[slots].split(HEADS, 1)
        for place in range(span.start, span.end):
            low = 0 if window is None else max(0, place - window + 1)
            for head in (0, HEADS * GROUP - 1):
                own = head % HEADS
                weights = (keys[low:, own] @ q[row, head] * made.score_scale).softmax(0)
                found = out[row].view(-1, SIZE)[head]
                torch.testing.assert_close(found, weights @ values[low:, own], rtol=1e-5, atol=1e-5)
            row += 1


@pytest.mark.parametrize("length", [20, 150])
def test_a_sink_is_one_more_key(length: int) -> None:
    """Within the first split and beyond it: as a key whose score is the sink and whose value is 0,
    which nobody else sees."""
    made, pages = geometry(), shuffled(10)
    kv, q = normal(0, 10 * PAGE, 2 * HEADS, SIZE), normal(1, 1, HEADS * GROUP, SIZE)
    sinks = normal(2, HEADS * GROUP)
    kernels: Any = triton_kernels(split=128, tile=16)
    out = GpuAttention(made, kernels).plan([SpanWindow(length - 1, 1, pages)])(q, kv, sinks)
    slots = torch.tensor([pages[at // PAGE] * PAGE + at % PAGE for at in range(length)])
    keys, values = kv[slots.to(DEVICE)].split(HEADS, 1)
    for head in range(HEADS * GROUP):
        scores = keys[:, head % HEADS] @ q[0, head] * made.score_scale
        weights = torch.cat((scores, sinks[head : head + 1])).softmax(0)[:-1]
        wanted = weights @ values[:, head % HEADS]
        torch.testing.assert_close(out.view(-1, SIZE)[head], wanted, rtol=1e-5, atol=1e-6)
