"""Trees through an attention for chains: the definition's values, and the bits of their chains."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foretoken.ops.attention import Geometry, SpanWindow
from foretoken.ops.attention.base import Attention
from foretoken.ops.attention.branches import BranchAttention
from foretoken.ops.attention.reference import ReferenceAttention
from foretoken.ops.attention.tiled import TiledAttention, Tiling
from tests.unit.test_attention import KINDS, TILINGS, geometry, random_store

SHAPE = geometry((6, 2, 8), 8)


def random_tree(draw: random.Random, nodes: int, length: int) -> tuple[tuple[int, ...], ...]:
    """Paths of a span of `length` committed tokens and a random tree after them."""
    paths = [tuple(range(i + 1)) for i in range(length)]
    for node in range(length, length + nodes):
        paths.append((*paths[draw.randint(length - 1, node - 1)], node))
    return tuple(paths)


def random_spans(draw: random.Random, shape: Geometry) -> list[SpanWindow]:
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
        spans = random_spans(draw, shape)
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
