"""Trees of drafts through the whole engine: the same tokens, to the last bit of their logprobs.

Every branch is junk or hides the right tokens, so that accepted nodes lie anywhere in the span and
their keys and values must be moved before the next step.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.backend import CpuKernels, PlainTorch
from foretoken.testing import TreeProposer, write_tiny_llama
from tests.e2e.lossless import EXACT, PARAMETERS, PRESSURES, VOCAB, Result, generate, make_prompts
from tests.marks import slow_but
from tests.property.exact import assert_alike

COUNT, TOKENS = 9, 32


def run(llm: LLM, name: str) -> list[Result]:
    return generate(llm, make_prompts(COUNT, 3), {"max_tokens": TOKENS, **PARAMETERS[name]})


@pytest.fixture(scope="module")
def plain(alone: LLM) -> Callable[[str], list[Result]]:
    return cache(partial(run, alone))


def open_llm(model: Path, outputs: dict[str, list[int]], **pressure: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 9}
    proposer = TreeProposer(VOCAB, outputs=outputs, seed=1)
    return LLM(str(model), proposer=proposer, speculative_config=config, **EXACT, **pressure)


def accepted(llm: LLM) -> float:
    [metric] = [m for m in llm.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens"]
    return float(metric.value)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_junk_trees_change_nothing(model: Path, plain: Any) -> None:
    with open_llm(model, {}, **PRESSURES["calm"]) as llm:
        for name in PARAMETERS:
            assert run(llm, name) == plain(name), name


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("name", ["greedy", "penalties", "logprobs"])
def test_right_branches_among_others(name: str, pressure: str, model: Path, plain: Any) -> None:
    expected = plain(name)
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    with open_llm(model, known, **PRESSURES[pressure]) as llm:
        assert run(llm, name) == expected
        assert accepted(llm) > COUNT * TOKENS / 3


@pytest.mark.slow
def test_the_same_without_compiled_kernels(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention for chains, branch by branch."""
    monkeypatch.setattr(CpuKernels, "attention", PlainTorch.attention)
    with LLM(str(model), **EXACT) as plain:
        expected = run(plain, "seeded")
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    with open_llm(model, known) as llm:
        assert run(llm, "seeded") == expected
        assert accepted(llm) > COUNT * TOKENS / 3


CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [2]]
DRAFTS: dict[str, dict[str, Any]] = {
    "auto": {"choices": CHOICES},
    "greedy": {"choices": CHOICES, "draft_sample_method": "greedy"},
    "dynamic": {"tree_top_k": 3, "tree_depth": 4, "num_speculative_tokens": 10},
    "wide": {"choices": [[0], [1], [2], [3], [3, 0], [3, 2]]},
    "standard": {"choices": CHOICES, "rejection_sample_method": "standard"},
}


def open_draft(model: Path, draft: Path, config: dict[str, Any], **pressure: Any) -> LLM:
    speculative = {"method": "draft_model", "model": str(draft), **config}
    return LLM(str(model), speculative_config=speculative, **EXACT, **pressure)


QUICK = ("greedy", "penalties", "bias", "logprobs", "several")


@pytest.mark.parametrize("drafts", slow_but(["auto", "greedy", "wide", "dynamic"], "dynamic"))
def test_trees_of_a_draft_model(drafts: str, model: Path, draft: Path, plain: Any) -> None:
    """Every parameter set in one batch, and under page shortage: identical."""
    with open_draft(model, draft, DRAFTS[drafts], **PRESSURES["calm"]) as llm:
        for name in PARAMETERS if drafts == "auto" else QUICK:
            assert run(llm, name) == plain(name), name
        assert accepted(llm) > 30
    with open_draft(model, draft, DRAFTS[drafts], **PRESSURES["shortage"]) as llm:
        assert run(llm, "seeded") == plain("seeded")


def test_a_perfect_draft_is_accepted_to_its_depth(model: Path) -> None:
    """Its first branch always, seeded too: the children are ranked by the target's own noise."""
    with open_draft(model, model, {"choices": CHOICES}) as llm:
        for name in ("greedy", "seeded"):
            params = SamplingParams(max_tokens=1 + 4 * 8, detokenize=False, **PARAMETERS[name])
            for request in llm.generate(make_prompts(4, 6), params, use_tqdm=False):
                metrics = request.outputs[0].metrics
                assert metrics is not None
                assert set(metrics.accepted_per_step) == {3}


def test_a_tree_keeps_more_than_its_first_branch(model: Path, tmp_path: Path) -> None:
    lengths = []
    near = write_tiny_llama(tmp_path, seed=1, scale=1.5)
    for choices in ([[0], [0, 0], [0, 0, 0]], CHOICES):
        with open_draft(model, near, {"choices": choices}) as llm:
            params = SamplingParams(max_tokens=64, temperature=0.0, detokenize=False)
            found = llm.generate(make_prompts(12, 8), params, use_tqdm=False)
            metrics = [request.outputs[0].metrics for request in found]
            steps = [n for m in metrics if m is not None for n in m.accepted_per_step]
            lengths.append(1 + sum(steps) / len(steps))
    assert lengths[1] > 1.1 * lengths[0] > 1.2


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["auto", pytest.param("greedy", marks=pytest.mark.slow), "dynamic"]
)
@pytest.mark.parametrize("rule", ["standard", "traversal"])
def test_drawn_trees_have_the_plain_distribution(
    rule: str, method: str, model: Path, tmp_path: Path
) -> None:
    """Five tokens, without and with trees: a two-sample chi-square of what came out."""
    samples = 1000
    params = SamplingParams(max_tokens=5, top_k=2, n=samples, detokenize=False, ignore_eos=True)
    near = write_tiny_llama(tmp_path, seed=1, scale=2.4)
    config: dict[str, Any] = {"rejection_sample_method": rule}
    if method == "dynamic":
        config |= {"tree_top_k": 2, "tree_depth": 2, "num_speculative_tokens": 4}
    else:
        config |= {"choices": [[0], [0, 0], [1], [1, 0]], "draft_sample_method": method}
    counts: list[Counter[tuple[int, ...]]] = []
    kept = 0.0
    for llm in (LLM(str(model), seed=3, **EXACT), open_draft(model, near, config, seed=4)):
        with llm:
            prompt = {"prompt_token_ids": [5, 17, 3]}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            counts.append(Counter(out.token_ids for out in output.outputs))
            kept = accepted(llm)
    assert kept > samples / 2
    assert_alike(*counts, least_freedom=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pressure", "drafts"),
    [
        ("calm", "auto"),
        ("calm", "dynamic"),
        pytest.param("chunks", "auto", marks=pytest.mark.slow),
        ("shortage", "auto"),
    ],
)
def test_kept_kv_of_the_draft_equals_kv_computed_anew(
    pressure: str, drafts: str, model: Path, draft: Path
) -> None:
    """Whatever branch was accepted: a drafter that remembers nothing drafts the same trees."""
    with open_draft(model, draft, DRAFTS[drafts], **PRESSURES[pressure]) as llm:
        drafters: Any = llm._engine.parts.proposer
        proposer = drafters.members["draft_model"].proposer
        propose, compared = proposer.propose, []

        def audited(context: Any) -> Any:
            found = propose(context)
            for span in context.spans:
                proposer.progress.rewind(span.sequence, 0)
            again = propose(context)
            assert (again.ids, again.parents) == (found.ids, found.parents)
            compared.append(sum(map(len, found.ids)))
            return found

        proposer.propose = audited
        for name in ("greedy", "seeded"):
            run(llm, name)
        assert sum(compared) > 200
