"""Greedy drafting in one foreign call drafts what drafting token by token drafts."""

from pathlib import Path

import pytest
import torch

from foretoken.kernels.library import find_library
from foretoken.models import LoadOptions
from foretoken.models.tensors import SpanLayout
from foretoken.runtime.runner import Runner
from foretoken.testing import write_tiny_llama

PAGE, PAGES, STEPS = 8, 20, 11
pytestmark = pytest.mark.skipif(find_library() is None, reason="no compiled kernels")


def _runner(folder: Path, dtype: torch.dtype, quantization: str | None) -> Runner:
    options = LoadOptions(
        dtype=dtype,
        device=torch.device("cpu"),
        batch_invariant=True,
        page_size=PAGE,
        quantization=quantization,
    )
    return Runner.load(folder, options, num_pages=PAGES)


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_tokens_and_the_kv_of_token_by_token(
    dtype: torch.dtype, quantization: str | None, tmp_path: Path
) -> None:
    """Three sequences of unequal length over scattered pages, across page borders."""
    folder = write_tiny_llama(tmp_path, seed=4, vocab_size=613, num_hidden_layers=3)
    one, other = (_runner(folder, dtype, quantization) for _ in range(2))
    tables = [[7, 2, 9, 4], [0, 11, 5, 3], [13, 1, 6, 8]]
    prompts = [[5, 9, 13, 400, 2], [8], list(range(20, 37))]
    layouts = [
        SpanLayout(start=0, num_tokens=len(p), page_table=t)
        for p, t in zip(prompts, tables, strict=True)
    ]
    newest = [int(i) for i in one.forward_last(layouts, prompts).argmax(dim=-1)]
    other.forward_last(layouts, prompts)

    def places(step: int) -> list[SpanLayout]:
        return [
            SpanLayout(start=len(p) + step, num_tokens=1, page_table=t)
            for p, t in zip(prompts, tables, strict=True)
        ]

    drafted = one.draft_greedily(places(0), newest, STEPS)
    assert drafted is not None and [len(ids) for ids in drafted] == [STEPS] * 3
    expected: list[list[int]] = [[], [], []]
    fed = newest
    for step in range(STEPS):
        fed = other.forward_last(places(step), [[i] for i in fed]).argmax(dim=-1).tolist()
        for ids, token in zip(expected, fed, strict=True):
            ids.append(token)
    assert drafted == expected
    assert len({tuple(ids) for ids in drafted}) == 3
    for mine, theirs in zip(one.store.layers, other.store.layers, strict=True):
        assert torch.equal(mine, theirs)


def test_what_has_no_kernel_drafts_token_by_token(tmp_path: Path) -> None:
    """Two kinds of attention, or float16: the caller is told to go on by itself."""
    folder = write_tiny_llama(tmp_path, seed=4)
    runner = _runner(folder, torch.float16, None)
    place = [SpanLayout(start=0, num_tokens=1, page_table=[0])]
    assert runner.draft_greedily(place, [3], 2) is None
