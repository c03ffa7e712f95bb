"""Trees of drafts through the whole engine: the same tokens, to the last bit of their logprobs, of
junk, of draft models, of heads, and as plans cut them.

Every branch is junk or hides the right tokens, so that accepted nodes lie anywhere in the span and
their keys and values must be moved before the next step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.backend import CpuKernels, PlainTorch
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.heads.stateless_head import StatelessProposer
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_tree import tree_of
from foretoken.testing import write_tiny_llama
from tests.drafters import TreeProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    EXACT,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    asking,
    audit,
    counted,
    drawn,
    make_prompts,
    open_exact,
)
from tests.marks import slow_but
from tests.property.exact import assert_alike

COUNT, TOKENS = 9, 32
run, plain = asking(COUNT, TOKENS)


def open_llm(model: Path, outputs: dict[str, list[int]], **pressure: Any) -> LLM:
    config = {"method": "ngram", "num_speculative_tokens": 9}
    proposer = TreeProposer(VOCAB, outputs=outputs, seed=1)
    return LLM(str(model), proposer=proposer, speculative_config=config, **EXACT, **pressure)


def accepted(llm: LLM) -> float:
    return counted(llm, "num_accepted_tokens")


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


CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [1, 0, 0], [2]]
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
    rule: str, method: str, model: Path, tmp_path: Path, drawn_plain: Any
) -> None:
    """Five tokens, without and with trees: a two-sample chi-square of what came out."""
    near = write_tiny_llama(tmp_path, seed=1, scale=2.4)
    config: dict[str, Any] = {"rejection_sample_method": rule}
    if method == "dynamic":
        config |= {"tree_top_k": 2, "tree_depth": 2, "num_speculative_tokens": 4}
    else:
        config |= {"choices": [[0], [0, 0], [1], [1, 0]], "draft_sample_method": method}
    with open_draft(model, near, config, seed=4) as llm:
        assert_alike(drawn(llm, 5, 1000), drawn_plain(5, 1000), least_freedom=3)
        assert accepted(llm) > 500


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
        compared = audit(drafters.members["draft_model"].proposer)
        for name in ("greedy", "seeded"):
            run(llm, name)
        assert sum(compared) > 200


NAMES = ("eagle", "eagle3", "peagle", "mlp", "medusa", "dflash", "dspark")
DEPTH = 3
DYNAMIC = {"tree_top_k": 3, "tree_depth": DEPTH, "num_speculative_tokens": 10}


def open_head(model: Path, folder: Path, name: str, **keys: Any) -> LLM:
    pressure = keys.pop("pressure", {})
    config = {"method": HEADS[name]["method"], "model": str(folder), **keys}
    return open_exact(model, config, **pressure)


@pytest.mark.parametrize("name", slow_but(NAMES, "eagle3", "dspark"))
def test_trees_change_no_token(
    name: str, model: Path, folders: dict[str, Path], plain: Callable[[str], list[Result]]
) -> None:
    keys = {"choices": CHOICES, "pressure": {**PRESSURES["shortage"], "max_num_seqs": 4}}
    with open_head(model, folders[name], name, **keys) as llm:
        for parameters in ("greedy", "filters", "several"):
            assert run(llm, parameters) == plain(parameters), parameters
    keys = {"choices": CHOICES, "draft_sample_method": "greedy"}
    with open_head(model, folders[name], name, **keys) as llm:
        assert run(llm, "penalties") == plain("penalties")


def chain_logits(
    proposer: KVProposer | StatelessProposer, span: Span, drafted: list[int]
) -> Tensor:
    """What the head's own chain gives after these drafts, [V]."""
    steps: Any
    if isinstance(proposer, KVProposer):
        steps = proposer.make_steps([replace(span, draft_budget=DEPTH)])
    else:
        steps = proposer.head.steps(proposer.newest_states([span]), [span])
    logits = steps.first()
    for count in range(1, len(drafted) + 1):
        logits = steps.after([0], [drafted[:count]])
    last: Tensor = logits[0]
    return last


@pytest.mark.parametrize("name", slow_but(NAMES, "eagle", "medusa", "dflash"))
def test_dynamic_trees_change_no_token(
    name: str, model: Path, folders: dict[str, Path], plain: Callable[[str], list[Result]]
) -> None:
    with open_head(model, folders[name], name, **DYNAMIC, pressure=PRESSURES["calm"]) as llm:
        for parameters in ("greedy", "seeded"):
            assert run(llm, parameters) == plain(parameters), parameters


@pytest.mark.parametrize("shape", [{"choices": CHOICES}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", slow_but(NAMES, "eagle3", "mlp", "dspark"))
def test_every_node_is_what_the_chain_would_draft(
    name: str, shape: dict[str, Any], model: Path, folders: dict[str, Path]
) -> None:
    """Down every branch: the node is the chain's candidate of its rank after the same drafts."""
    with open_head(model, folders[name], name, **shape) as llm:
        drafters: Any = llm._engine.parts.proposer
        [member] = drafters.members.values()
        propose, compared = member.proposer.propose, []

        def audited(context: Context) -> Draft:
            found: Draft = propose(context)
            for span, ids, parents in zip(
                context.spans, found.ids, found.parents or (), strict=True
            ):
                if not ids:
                    continue
                tree = tree_of(parents or ())
                for node, path in enumerate(tree.paths):
                    before = [ids[i] for i in path[:-1]]
                    siblings = tree.children[path[-2] + 1 if before else 0]
                    with torch.inference_mode():
                        logits_V = chain_logits(member.proposer, span, before)
                    best = logits_V.topk(len(siblings)).indices
                    assert ids[node] == int(best[siblings.index(node)]), (path, ids)
                compared.append(len(ids))
            return found

        member.proposer.propose = audited
        params = SamplingParams(max_tokens=18, temperature=0.0, detokenize=False)
        llm.generate(make_prompts(2, 5), params, use_tqdm=False)
    assert sum(compared) > 60


def test_a_tree_deeper_than_the_head_is_refused(model: Path, folders: dict[str, Path]) -> None:
    deep = [[0] * n for n in range(1, 5)]
    with pytest.raises(ConfigError, match="at most 3"):
        open_head(model, folders["mlp"], "mlp", choices=deep)
    with pytest.raises(ConfigError, match="tree_depth.*at most 3"):
        open_head(model, folders["medusa"], "medusa", tree_top_k=2, tree_depth=4)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{"choices": CHOICES}, DYNAMIC], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_trees_of_heads_have_the_plain_distribution(
    name: str, shape: dict[str, Any], model: Path, folders: dict[str, Path], drawn_plain: Any
) -> None:
    """Four tokens without a seed: a two-sample chi-square of what came out."""
    config = {"method": name, "model": str(folders[name]), **shape}
    with open_exact(model, config, seed=3) as llm:
        assert_alike(drawn(llm, 4), drawn_plain(4), least_freedom=3)
