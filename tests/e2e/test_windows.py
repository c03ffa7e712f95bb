"""Layers with a window let go of what no row to come sees: the same tokens, in fewer bytes.

The guarded bugs: something is let go that a row of a chunk, a draft, a branch, a prefix hit or a
request that was preempted still reads; memory that is counted as free and is not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from foretoken import LLM
from foretoken.engine.timing import _usual_machine
from foretoken.kv import store as stores
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import most_pages
from tests.drafters import TreeProposer
from tests.e2e.lossless import EXACT, PRESSURES, VOCAB, Result, generate, make_prompts, open_llm
from tests.golden.families import MIXTURES, OWN, write_checkpoint

FAST = "gemma3 two kinds of positions"
CASES = (
    FAST,
    *(pytest.param(case, marks=pytest.mark.slow) for case in (
        "mistral window", "gpt_oss", "afmoe", "gemma4 layers that share",
        "gemma4 experts, keys as values",
    )),
)  # fmt: skip
PARAMETERS = ({"temperature": 0.0}, {"temperature": 0.9, "seed": 5, "n": 2, "logprobs": 2})
TOKENS, LENGTH, PAGE, STEP = 36, 128, 8, 16


@dataclass(slots=True)
class Poison:
    """Writes nonsense where memory is given back, so that whoever reads it shows."""

    pages: int = 0

    def __call__(self, rows_SX: Tensor, first: int, stop: int) -> None:
        rows_SX[first:stop] = 9
        self.pages += 1


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[Poison]:
    found = Poison()
    monkeypatch.setattr(stores, "give_back", found)
    yield found


def write_model(folder: Path, case: str) -> ModelShape:
    kind, changes = {**OWN, **MIXTURES}[case]
    words = {name: VOCAB for name in changes if name == "vocab_size_per_layer_input"}
    write_checkpoint(folder, kind, {**changes, **words, "vocab_size": VOCAB})
    return ModelShape.from_config(folder)


def tight(shape: ModelShape, sequences: float) -> dict[str, Any]:
    """Settings that leave room for so many of the longest sequences."""
    assert shape.widest_window is not None
    most = PAGE * min(LENGTH // PAGE, most_pages(shape.widest_window, STEP, PAGE))
    seen = shape.kv_bytes_per_token(4, windowed=True)
    rest = shape.kv_bytes_per_token(4, windowed=False)
    one = LENGTH * rest + most * seen
    return {
        "kv_cache_memory_bytes": int(sequences * one) + LENGTH,
        "max_model_len": LENGTH,
        "max_num_batched_tokens": STEP,
        "block_size": PAGE,
        "max_num_seqs": 9,
    }


def ask(llm: LLM) -> list[list[Result]]:
    prompts = make_prompts(6, 3)
    return [generate(llm, prompts, {"max_tokens": TOKENS, **p}) for p in PARAMETERS]


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_in_little_memory(case: str, tmp_path: Path, poison: Poison) -> None:
    """Chunks, prefix hits, preemption, wrong drafts and trees, all while pages are short."""
    shape = write_model(tmp_path, case)
    with open_llm(tmp_path, None, "plain", **PRESSURES["one at a time"]) as llm:
        expected = ask(llm)
    assert len({result.token_ids for result in expected[0]}) > 3, "a model that says one thing"
    known = {str(i): list(one.token_ids) for i, one in enumerate(expected[0])}
    trees = TreeProposer(VOCAB, outputs=known, seed=2)
    preempted = hits = 0
    for method, proposer, sequences in (("ngram", None, 1), ("junk", None, 1.5), ("", trees, 12)):
        settings = tight(shape, sequences)
        if proposer is not None:
            settings["proposer"] = proposer
        with open_llm(tmp_path, None, method, **settings) as llm:
            parts = llm._engine.parts
            if parts.shared is None or parts.shared.windows is None:
                pytest.skip("this device does not give memory back")
            for _ in range(2 if proposer is not None else 1):
                assert ask(llm) == expected, (method, sequences)
                parts.scheduler.check_integrity()
            assert sequences > 2 or parts.shared.windows.num_reclaimed, "nothing was let go"
            assert parts.scheduler.kv_usage == 0.0
            preempted += parts.scheduler.num_preemptions
            assert parts.scheduler.prefix is not None
            hits += parts.scheduler.prefix.num_hit_tokens
    # Where all layers have a window nobody outgrows the room that a prompt was let in with.
    grows = shape.kv_bytes_per_token(4, windowed=False) > 0
    assert all((preempted or not grows, hits, poison.pages)), (preempted, hits, poison.pages)


@pytest.mark.slow
def test_ranks_let_go_together(tmp_path: Path) -> None:
    shape = write_model(tmp_path, FAST)
    with open_llm(tmp_path, None, "plain", **PRESSURES["one at a time"]) as llm:
        expected = ask(llm)
    settings = {**tight(shape, 1.7), "tensor_parallel_size": 2}
    with open_llm(tmp_path, None, "ngram", **settings) as llm:
        parts = llm._engine.parts
        assert ask(llm) == expected
        if parts.shared is not None and parts.shared.windows is not None:
            assert parts.shared.windows.num_reclaimed
            page = parts.runner.window_bytes
            assert page == PAGE * shape.kv_bytes_per_token(4, windowed=True)


@pytest.mark.slow
def test_a_draft_model_beside_it(tmp_path: Path, poison: Poison) -> None:
    """Its pages and those of layers with a window are of one budget."""
    shape = write_model(tmp_path, FAST)
    with open_llm(tmp_path, None, "plain", **PRESSURES["one at a time"]) as llm:
        expected = ask(llm)
    drafting = {"method": "draft_model", "model": str(tmp_path), "num_speculative_tokens": 3}
    settings = {**tight(shape, 3), "speculative_config": drafting}
    with LLM(str(tmp_path), **EXACT, **settings) as llm:
        parts = llm._engine.parts
        for _ in range(2):
            assert ask(llm) == expected
            parts.scheduler.check_integrity()
            if parts.shared is not None:
                parts.shared.check_integrity()
        assert parts.shared is None or parts.shared.windows is None or poison.pages


def test_steps_are_priced_by_what_windows_see(tmp_path: Path) -> None:
    shape = write_model(tmp_path, FAST)
    with LLM(str(tmp_path), dtype="float32", kv_cache_dtype="int8") as llm:
        parts = llm._engine.parts
        cost = _usual_machine(parts.config, parts.runner)
    read = [context * cost.kv_bytes(context) for context in (1, 9, 10, 100)]
    assert read[1] == pytest.approx(9 * read[0]) and cost.kv_bytes(5) == cost.kv_bytes(1)
    full = sum(window is None for window in shape.windows)
    each = read[0] / shape.num_hidden_layers
    assert 0 < full < shape.num_hidden_layers
    assert read[3] - read[2] == pytest.approx(90 * full * each)


def test_a_long_request_takes_what_its_windows_see(tmp_path: Path) -> None:
    """Bytes a token: those of the layers that see all, and the window's once."""
    shape = write_model(tmp_path, FAST)
    seen = shape.kv_bytes_per_token(4, windowed=True)
    rest = shape.kv_bytes_per_token(4, windowed=False)
    assert seen == 2 * rest, "two of three layers have a window"
    with open_llm(tmp_path, None, "plain", **tight(shape, 1)) as llm:
        parts = llm._engine.parts
        if parts.shared is None:
            pytest.skip("this device does not give memory back")
        assert parts.config.num_kv_tokens == LENGTH
        words = "\n".join(parts.config.describe_memory())
        assert f"{LENGTH} tokens x {rest} B, and of the last 9 of each {seen} B more" in words
        generate(llm, [{"prompt_token_ids": [3, 5] * 50}], {"max_tokens": 20})
        windows = parts.shared.windows
        assert windows is not None
        assert windows.num_bytes <= most_pages(9, STEP, PAGE) * PAGE * seen < LENGTH * seen / 2
