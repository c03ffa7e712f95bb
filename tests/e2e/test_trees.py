"""Trees of drafts through the whole engine: the same tokens, to the last bit of their logprobs.

Every branch is junk or hides the right tokens, so that accepted nodes lie anywhere in the span and
their keys and values must be moved before the next step.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.testing import TreeProposer
from tests.e2e.lossless import PARAMETERS, PRESSURES, VOCAB, Result, generate, make_prompts

SETTINGS: dict[str, Any] = {"dtype": "float32", "batch_invariant": True}
COUNT, TOKENS = 9, 32


class Reference:
    """Plain decoding, one request at a time, once per parameter set."""

    def __init__(self, model: Path) -> None:
        self._llm = LLM(str(model), **SETTINGS, **PRESSURES["one at a time"])
        self._known: dict[str, list[Result]] = {}

    def results(self, name: str) -> list[Result]:
        if name not in self._known:
            self._known[name] = run(self._llm, name)
        return self._known[name]


def run(llm: LLM, name: str) -> list[Result]:
    return generate(llm, make_prompts(COUNT, 3), {"max_tokens": TOKENS, **PARAMETERS[name]})


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    yield Reference(model)


def open_llm(model: Path, outputs: dict[str, list[int]], **pressure: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 9}
    proposer = TreeProposer(VOCAB, outputs=outputs, seed=1)
    return LLM(str(model), proposer=proposer, speculative_config=config, **SETTINGS, **pressure)


def accepted(llm: LLM) -> float:
    [metric] = [m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    return float(metric.value)  # type: ignore[attr-defined]


def test_junk_trees_change_nothing(model: Path, reference: Reference) -> None:
    with open_llm(model, {}, **PRESSURES["calm"]) as llm:
        for name in PARAMETERS:
            assert run(llm, name) == reference.results(name), name


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("name", ["greedy", "penalties", "logprobs"])
def test_right_branches_among_others(
    name: str, pressure: str, model: Path, reference: Reference
) -> None:
    expected = reference.results(name)
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    with open_llm(model, known, **PRESSURES[pressure]) as llm:
        assert run(llm, name) == expected
        assert accepted(llm) > COUNT * TOKENS / 3


def test_the_same_without_compiled_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention for chains, branch by branch."""
    monkeypatch.setattr("foretoken.ops.attention.choose.find_library", lambda: None)
    with LLM(str(model), **SETTINGS) as plain:
        expected = run(plain, "seeded")
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    with open_llm(model, known) as llm:
        assert run(llm, "seeded") == expected
        assert accepted(llm) > COUNT * TOKENS / 3
