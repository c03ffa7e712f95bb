"""Drives a Runner over one or many sequences in every way a scheduler might."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from foretoken.models import LoadOptions
from foretoken.models.tensors import SpanLayout
from foretoken.ops.quantize_kv import quantize_kv
from foretoken.runtime.runner import Runner
from foretoken.shape.memory_formula import KV_SCALE_BYTES

PAGE = 4
NUM_PAGES = 128


def open_runner(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    batch_invariant: bool = False,
    kv_store_dtype: torch.dtype | None = None,
    max_model_len: int | None = None,
    points: Sequence[int] = (),
    quantization: str | None = None,
) -> Runner:
    """A runner whose pages already hold what somebody else left behind."""
    options = LoadOptions(
        dtype=dtype, device=torch.device("cpu"), batch_invariant=batch_invariant, page_size=PAGE,
        kv_store_dtype=kv_store_dtype, max_model_len=max_model_len, quantization=quantization,
    )  # fmt: skip
    runner = Runner.load(folder, options, num_pages=NUM_PAGES, points=points)
    leave_garbage(runner)
    return runner


def leave_garbage(runner: Runner) -> None:
    generator = torch.Generator().manual_seed(7)
    for layer in runner.store.layers:
        used = layer[: NUM_PAGES * PAGE]
        size = layer.shape[2] - (KV_SCALE_BYTES if layer.dtype == torch.int8 else 0)
        numbers = torch.randn((*used.shape[:2], size), generator=generator) * 50
        used.copy_(quantize_kv(numbers, layer.dtype))


def tables(draw: random.Random, lengths: Sequence[int], *, together: bool) -> list[list[int]]:
    """Page tables of sequences of these lengths: neighbours in order, or scattered."""
    pages = list(range(NUM_PAGES))
    if not together:
        draw.shuffle(pages)
    found, at = [], draw.randrange(4)
    for length in lengths:
        count = -(-length // PAGE)
        found.append(pages[at : at + count])
        at += count
    assert at <= NUM_PAGES, (at, NUM_PAGES)
    return found


def forward(runner: Runner, spans: Sequence[tuple[list[int], int, int, list[int]]]) -> Tensor:
    """Logits of every token of spans (ids of the sequence, start, stop, pages)."""
    layouts = [
        SpanLayout(start=start, num_tokens=stop - start, page_table=pages)
        for _, start, stop, pages in spans
    ]
    ids = [sequence[start:stop] for sequence, start, stop, _ in spans]
    total = sum(map(len, ids))
    return runner.forward(layouts, ids, list(range(total))).logits_RV


def in_pieces(runner: Runner, ids: list[int], pages: list[int], lengths: list[int]) -> Tensor:
    """Logits of the whole sequence, computed in consecutive pieces of these lengths."""
    assert sum(lengths) == len(ids), (sum(lengths), len(ids))
    rows, at = [], 0
    for length in lengths:
        rows.append(forward(runner, [(ids, at, at + length, pages)]))
        at += length
    return torch.cat(rows)


def cut(draw: random.Random, total: int, choices: Sequence[int]) -> list[int]:
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, draw.choice(choices)))
    return lengths
