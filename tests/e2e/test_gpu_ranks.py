"""A GPU's steps on several ranks, over gloo, with twins in the place of kernels: what one rank
computes, to the bit, in steps that are recorded and played, in prompts and beside drafts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM
from foretoken.errors import ConfigError
from foretoken.models.tensors import SpanLayout
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.testing import write_tiny_llama
from tests.e2e.heads import write_head
from tests.e2e.lossless import Result, counted, generate, make_prompts, open_exact
from tests.golden.families import MIXTURES, write_checkpoint
from tests.gpu_twins import twins
from tests.marks import slow

LAYERS, HIDDEN = 2, 128
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": 512, "head_dim": 32,
    "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": LAYERS,
}  # fmt: skip
"""Both matrices that lead back to the stream have four segments."""
DRAFTS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "draft model": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
}


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[TwinKernels]:
    with twins() as found:
        yield found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("ranks")
    draft = write_tiny_llama(root / "draft", **{**SHAPE, "num_hidden_layers": 1})
    return {
        "plain": write_tiny_llama(root / "target", **SHAPE),
        "draft model": draft,
        "eagle3": write_head(root / "eagle3", "eagle3", draft, HIDDEN),
    }


def open_ranks(folders: dict[str, Path], ranks: int, name: str = "plain", **more: Any) -> LLM:
    config = DRAFTS[name]
    if config is not None:
        config = {**config, "model": str(folders[name])}
    given = {"max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20, **more}
    return open_exact(folders["plain"], config, tensor_parallel_size=ranks, **given)


def logits(llm: LLM) -> list[Tensor]:
    """Of a prompt, and of few rows, twice, so that they are recorded and played."""
    runner = llm._engine.parts.runner
    prompt = SpanLayout(start=0, num_tokens=75, page_table=list(range(5)))
    step = SpanLayout(start=75, num_tokens=3, page_table=list(range(5)))
    ids = [7 * i % 90 for i in range(75)]
    found = [runner.forward([prompt], [ids], range(70, 75))]
    found += [runner.forward([step, prompt], [[4, 5, 6], ids], [0, 1, 2, 77]) for _ in range(2)]
    found += [runner.forward([step], [[4, 5, 6]], range(3)) for _ in range(3)]
    return [one.logits_RV for one in found]


def tokens(llm: LLM) -> list[list[Result]]:
    """Drawn in the step, and outside of it where logits are edited or shown."""
    drawn = {"temperature": 0.9, "seed": 1}
    ways = ({"temperature": 0.0, "logprobs": 2}, drawn, {**drawn, "top_k": 9})
    return [generate(llm, make_prompts(3, 3), {"max_tokens": 9, **way}) for way in ways]


@pytest.fixture(scope="module")
def alone(
    folders: dict[str, Path], kernels: TwinKernels
) -> tuple[list[Tensor], list[list[Result]]]:
    with open_ranks(folders, 1) as llm:
        return logits(llm), tokens(llm)


@pytest.mark.parametrize("ranks", [2, slow(4)])
def test_ranks_have_the_bits_of_one(
    ranks: int, folders: dict[str, Path], alone: Any, kernels: TwinKernels
) -> None:
    """Few rows are gathered twice a layer, and once behind the head."""
    with open_ranks(folders, ranks) as llm:
        found = logits(llm)
        kernels.launched.clear()
        assert tokens(llm) == alone[1]
        exchanges, gathers = (kernels.launched[name] for name in ("exchange", "gather"))
        assert gathers and gathers % (2 * LAYERS + 1) == exchanges % (2 * LAYERS) == 0
        runner = llm._engine.parts.runner
        assert runner.store.layers[0].shape[1] == 2 * SHAPE["num_key_value_heads"] // ranks
    assert all(map(torch.equal, found, alone[0]))


MIXTURES_HERE = {"glm4_moe": {"first_k_dense_replace": 1}, "gpt_oss": {"intermediate_size": 64}}


@pytest.mark.parametrize("quantization", [None, slow("int4")])
@pytest.mark.parametrize("case", ["glm4_moe", slow("gpt_oss")])
def test_mixtures_too(
    case: str, quantization: str | None, tmp_path: Path, kernels: TwinKernels
) -> None:
    """Ranks have columns of every expert, of what they share too, and of each of their biases."""
    kind, changes = MIXTURES[case]
    sizes = {**changes, **SHAPE, **MIXTURES_HERE[case], "moe_intermediate_size": 64}
    write_checkpoint(tmp_path, kind, sizes)
    found = []
    for ranks in (1, 2):
        with open_ranks({"plain": tmp_path}, ranks, quantization=quantization) as llm:
            kernels.launched.clear()
            found.append((logits(llm), tokens(llm)))
            assert kernels.launched["experts_down"] > 0
    assert kernels.launched["gather"] > 0
    assert found[0][1] == found[1][1] and all(map(torch.equal, found[0][0], found[1][0]))


@pytest.mark.parametrize("drafts", [slow("draft model"), "eagle3"])
def test_drafts_on_one_rank_change_nothing(
    drafts: str, folders: dict[str, Path], alone: Any
) -> None:
    """Chains are recorded on rank 0, which has all of the drafter; the target is on both."""
    with open_ranks(folders, 2, drafts) as llm:
        assert tokens(llm) == alone[1]
        assert counted(llm, "num_accepted_tokens") > 0


@pytest.mark.parametrize("quantization", [slow("int8"), slow("int4")])
def test_rounded_matrices_too(quantization: str, folders: dict[str, Path]) -> None:
    found = []
    for ranks in (1, 2):
        with open_ranks(folders, ranks, quantization=quantization) as llm:
            found.append(logits(llm))
    assert all(map(torch.equal, *found))


def test_what_does_not_divide_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    """The error says which numbers would."""
    folder = write_tiny_llama(tmp_path / "model", **{**SHAPE, "intermediate_size": 384})
    with pytest.raises(ConfigError, match=r"one of \[1, 3\].* 3 segments") as found:
        open_ranks({"plain": folder}, 2)
    assert found.value.field == "tensor_parallel_size"
