"""Promise 1 over a GPU's steps, with twins in the place of its kernels: the same tokens with and
without speculation, recorded and padded as on a device.

`make test-gpu-twins` runs the whole suites so; these few are in every run.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken.ops.twin_kernels import TwinKernels
from foretoken.testing import TreeProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    counted,
    generate,
    make_prompts,
    open_exact,
    with_model,
)
from tests.gpu_twins import twins
from tests.marks import slow_but

COUNT, TOKENS = 6, 14
NAMES = ("greedy", "seeded", "filters", "greedy penalties")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[TwinKernels]:
    with twins() as found:
        yield found


def run(llm: Any, name: str) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[name]}
    return generate(llm, make_prompts(COUNT, 3), chosen)


@pytest.fixture(scope="module")
def plain(model: Path, kernels: TwinKernels) -> dict[str, list[Result]]:
    """Without drafts, one request at a time."""
    with open_exact(model, None, **PRESSURES["one at a time"]) as llm:
        return {name: run(llm, name) for name in NAMES}


@pytest.mark.parametrize("method", slow_but([*METHODS, *HEADS], "ngram", "draft auto", "eagle3"))
def test_drafts_change_nothing(
    method: str,
    model: Path,
    folders: dict[str, Path],
    plain: dict[str, list[Result]],
    kernels: TwinKernels,
) -> None:
    if method in METHODS:
        config = with_model(METHODS[method], folders["draft_model"])
    else:
        config = {**HEADS[method], "model": str(folders[method])}
    kernels.launched.clear()
    with open_exact(model, config, max_num_seqs=4) as llm:
        for name in NAMES:
            assert run(llm, name) == plain[name], name
        assert counted(llm, "num_accepted_tokens") > 0
    assert kernels.launched["attend"] > 0


def test_right_branches_of_trees(model: Path, plain: dict[str, list[Result]]) -> None:
    """Nodes stand where a chain would not have them, and have a chain's bits."""
    known = {str(i): list(result.token_ids) for i, result in enumerate(plain["greedy"])}
    config = {"method": "ngram", "num_speculative_tokens": 9}
    proposer = TreeProposer(VOCAB, outputs=known, seed=1)
    with open_exact(model, config, proposer=proposer, max_num_seqs=4) as llm:
        assert run(llm, "greedy") == plain["greedy"]
        assert counted(llm, "num_accepted_tokens") > COUNT * TOKENS / 3
