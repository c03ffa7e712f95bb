"""Trees of heads: the same tokens as plain decoding, and every node what a chain would draft."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.heads.stateless import StatelessProposer
from foretoken.proposers.own_kv import KVProposer
from foretoken.runtime.batch import Span
from foretoken.runtime.draft_tree import tree_of
from tests.e2e.heads import HEADS
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts, open_exact
from tests.marks import slow_but
from tests.property.exact import assert_alike

CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [1, 0, 0], [2]]
NAMES = ("eagle", "eagle3", "peagle", "mlp", "medusa", "dflash", "dspark")
DEPTH = 3
DYNAMIC = {"tree_top_k": 3, "tree_depth": DEPTH, "num_speculative_tokens": 10}
COUNT, TOKENS = 6, 24


@pytest.fixture(scope="module")
def plain(alone: LLM) -> Callable[[str], list[Result]]:
    return cache(partial(run, alone))


def run(llm: LLM, name: str) -> list[Result]:
    return generate(llm, make_prompts(COUNT, 3), {"max_tokens": TOKENS, **PARAMETERS[name]})


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
        steps = proposer.head.chain_steps(proposer.newest_states([span]), [span])
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
def test_drawn_tokens_have_the_plain_distribution(
    name: str, shape: dict[str, Any], model: Path, folders: dict[str, Path]
) -> None:
    """Four tokens without a seed: a two-sample chi-square of what came out."""
    params = SamplingParams(
        max_tokens=4, temperature=1.0, top_k=2, n=1200, detokenize=False, ignore_eos=True
    )
    counts: list[Counter[tuple[int, ...]]] = []
    for config in (None, {"method": name, "model": str(folders[name]), **shape}):
        with open_exact(model, config, seed=3) as llm:
            (output,) = llm.generate([{"prompt_token_ids": [5, 17, 3]}], params, use_tqdm=False)
            counts.append(Counter(out.token_ids for out in output.outputs))
    assert_alike(*counts, least_freedom=3)
