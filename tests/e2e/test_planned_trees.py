"""Trees as plans cut them: any nodes, any depth, any price, and the same tokens."""

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.control.plan import (
    DecodingSequence,
    DraftOutcome,
    DraftPlan,
    DraftPrice,
    PlannedTree,
    StepLoad,
)
from foretoken.proposers.choose.drafters import Drafters, draft_outcomes
from foretoken.runtime.batch import Batch
from foretoken.runtime.verifier import Verification
from foretoken.types import StepStats
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, generate, make_prompts, open_exact
from tests.marks import slow_but
from tests.property.exact import assert_alike

CHOICES = [[0], [0, 0], [0, 0, 0], [0, 0, 1], [0, 1], [1], [1, 0], [1, 0, 0], [2]]
SHAPES: dict[str, dict[str, Any]] = {
    "static": {"choices": CHOICES},
    "dynamic": {"tree_top_k": 3, "tree_depth": 3, "num_speculative_tokens": 9},
}
DRAFTERS = ("draft_model", "eagle3", "mlp", "medusa", "dflash", "dspark")
COUNT, TOKENS = 8, 30


@pytest.fixture(scope="module")
def folders(folders: dict[str, Path], draft: Path) -> dict[str, Path]:
    return {"draft_model": draft, **folders}


@pytest.fixture(scope="module")
def plain(alone: LLM) -> Callable[[str], list[Result]]:
    return cache(partial(run, alone))


def run(llm: LLM, name: str) -> list[Result]:
    return generate(llm, make_prompts(COUNT, 3), {"max_tokens": TOKENS, **PARAMETERS[name]})


class AnyPlan:
    def __init__(self, llm: LLM, seed: int) -> None:
        parts = llm._engine.parts
        assert isinstance(parts.proposer, Drafters)
        [(self.name, member)] = parts.proposer.members.items()
        self.paths, self.most = member.proposer.tree_paths, member.most
        self.draw = random.Random(seed)
        self.outcomes: list[DraftOutcome] = []
        parts.scheduler._plan_drafts = self.plan
        object.__setattr__(parts, "observers", (*parts.observers, self.observe))

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        depth = self.draw.randint(1, 3)
        trees = [self.tree(depth) if self.draw.random() < 0.8 else None for _ in sequences]
        lengths = tuple(0 if tree is None else len(tree.nodes) for tree in trees)
        price = DraftPrice(1.0, self.draw.choice((0.0, 0.1, 0.4)), 0.6, self.draw.random())
        return DraftPlan(
            load=load,
            drafts=lengths,
            lengths=lengths,
            drafters=tuple(self.name if tree else "" for tree in trees),
            trees=tuple(trees),
            prices={self.name: price} if self.draw.random() < 0.7 else {},
        )

    def tree(self, depth: int) -> PlannedTree:
        """Nodes with their parents, in an order in which each beginning is a tree."""
        nodes: list[int] = []
        for _ in range(self.draw.randint(1, self.most)):
            there = {(), *(self.paths[node] for node in nodes)}
            more = [
                node
                for node, path in enumerate(self.paths)
                if node not in nodes and path[:-1] in there and len(path) <= depth
            ]
            if more:
                nodes.append(self.draw.choice(more))
        return PlannedTree(tuple(nodes), depth)

    def observe(self, batch: Batch, verification: Verification, stats: StepStats) -> None:
        for span in batch.spans:
            planned = span.planned_tree
            assert planned is None or span.num_drafts <= len(planned.nodes)
            assert planned is None or span.draft_depth <= planned.depth
        found = draft_outcomes(batch, verification)
        for one in found:
            assert one.tried is None or sum(kept >= 0 for _, kept in one.tried) == one.num_accepted
        self.outcomes += found
        depths = [span.draft_depth for span in batch.spans]
        assert max((one.depth for one in stats.drafters), default=0) == max(depths, default=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", slow_but(DRAFTERS, "dspark"))
def test_no_plan_changes_a_token(
    name: str,
    shape: str,
    model: Path,
    folders: dict[str, Path],
    plain: Callable[[str], list[Result]],
) -> None:
    config = {"method": name, "model": str(folders[name]), **SHAPES[shape]}
    for seed, pressure in enumerate(("calm", "shortage")):
        with open_exact(model, config, **PRESSURES[pressure]) as llm:
            plans = AnyPlan(llm, seed)
            for parameters in ("greedy", "filters", "several"):
                assert run(llm, parameters) == plain(parameters), (parameters, pressure)
            assert any(one.tried for one in plans.outcomes)
            if name in ("draft_model", "eagle3"):
                assert any(one.num_accepted for one in plans.outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["draft_model", "dflash", "dspark"])
def test_drawn_tokens_have_the_plain_distribution(
    name: str, shape: str, model: Path, folders: dict[str, Path]
) -> None:
    """Four tokens without a seed: a two-sample chi-square of what came out."""
    samples = 1200
    params = SamplingParams(
        max_tokens=4, temperature=1.0, top_k=2, n=samples, detokenize=False, ignore_eos=True
    )
    counts: list[Counter[tuple[int, ...]]] = []
    for config in (None, {"method": name, "model": str(folders[name]), **SHAPES[shape]}):
        with open_exact(model, config, seed=3) as llm:
            plans = None if config is None else AnyPlan(llm, 1)
            prompt = {"prompt_token_ids": [5, 17, 3]}
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            counts.append(Counter(out.token_ids for out in output.outputs))
            accepted = plans is None or any(one.num_accepted for one in plans.outcomes)
            assert accepted or name != "draft_model"
    assert_alike(*counts, least_freedom=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_control_of_trees_changes_no_token(
    shape: str, model: Path, draft: Path, plain: Callable[[str], list[Result]],
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
) -> None:  # fmt: skip
    """The real planner, which begins with the data sheet of a usual machine."""
    monkeypatch.setenv("FORETOKEN_TIMING_SECONDS", "0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = {"method": "draft_model", "model": str(draft), **SHAPES[shape]}
    drafted = 0
    with open_exact(model, config, adaptive_speculation=True, max_num_seqs=5) as llm:
        for parameters in ("greedy", "filters", "several"):
            assert run(llm, parameters) == plain(parameters)
        drafted += llm._engine.metrics._totals.num_drafts
    assert drafted, "a drafter is tried"
