"""Steps in which heads rest: nothing is kept for them, and they never read what was not kept."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM
from foretoken.control.plan import DecodingSequence, DraftPlan, StepLoad
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.runtime.runner import slot_of
from tests.e2e.heads import HEADS
from tests.e2e.lossless import PRESSURES, asking, counted, open_exact
from tests.marks import slow_but

NAMES = ("eagle", "eagle3", "peagle", "mlp", "medusa", "dflash", "dspark")
run, plain = asking(9, 40)


class Resting:
    """Plans stretches of steps in which some drafters rest, and looks at what the others read."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.parts = llm._engine.parts
        self.members = self.parts.proposer.members  # type: ignore[attr-defined]
        self._draw = random.Random(seed)
        self._resting, self._left = frozenset[str](), 0
        self.num_rested = self.num_drafted = 0
        features = self.parts.runner.features
        assert features is not None
        self.features = features
        features.slots_SF.fill_(torch.nan)
        self.parts.scheduler._plan_drafts = self.plan
        for name, member in self.members.items():
            proposer = member.proposer
            proposer.propose = self.watch(name, proposer, proposer.propose)

    def plan(self, requests: Any, load: StepLoad) -> DraftPlan:
        if self._left == 0:
            self._left = self._draw.choice((1, 3, 9, 14))
            names = sorted(self.members)
            self._resting = frozenset(n for n in names if self._draw.random() < 0.5)
        self._left -= 1
        self.num_rested += bool(self._resting)
        everybody = self._resting == self.members.keys()
        most = 0 if everybody else 3
        return DraftPlan(load=load, budgets=(most,) * len(requests), resting=self._resting)

    def watch(self, name: str, proposer: Any, propose: Callable[[Context], Draft]) -> Any:
        def watched(context: Context) -> Draft:
            if name in self._resting:
                return Draft.empty(len(context.spans))
            found = propose(context)
            for span, ids in zip(context.spans, found.ids, strict=True):
                if ids:
                    self.num_drafted += 1
                    self.check(proposer, span.sequence)
            return found

        return watched

    def check(self, proposer: Any, sequence: Any) -> None:
        """All that the head can have read of this sequence was kept, and is not from elsewhere."""
        first, size = sequence.num_tokens - 2, self.parts.runner.page_size
        if isinstance(proposer, KVProposer):
            first = sequence.num_tokens - proposer.progress.seen(sequence).num_tokens
        slots = [
            slot_of(i, sequence.page_table, size) for i in range(first, sequence.num_tokens - 1)
        ]
        network: Any = proposer.network if isinstance(proposer, KVProposer) else None
        view = proposer._site.view if network is None else network.features
        assert not view.read(torch.tensor(slots)).isnan().any()


@pytest.mark.parametrize("pressure", slow_but(["calm", "chunks", "shortage"], "shortage"))
@pytest.mark.parametrize("name", slow_but(NAMES, *list(NAMES)[::3]))
def test_heads_read_only_what_was_kept(
    name: str, pressure: str, model: Path, folders: dict[str, Path], plain: Any
) -> None:
    """Prompts and tokens of resting steps, prefix hits on their pages, preemption."""
    config = {**HEADS[name], "model": str(folders[name])}
    kept = {"block_size": 8, "adaptive_speculation": True}
    with open_exact(model, config, **kept | PRESSURES[pressure]) as llm:
        resting = Resting(llm, seed=2)
        for parameters in ("greedy", "filters", "seeded", "greedy"):
            assert run(llm, parameters) == plain(parameters), parameters
    assert resting.num_rested > 30 and resting.num_drafted > 50


@pytest.mark.slow
def test_one_head_rests_and_the_other_does_not(
    model: Path, folders: dict[str, Path], plain: Any
) -> None:
    """They read different points of the target."""
    drafters = [
        {**HEADS[name], "model": str(folders[name])} for name in ("eagle3", "eagle", "dspark")
    ]
    with open_exact(model, {"drafters": drafters}, block_size=8) as llm:
        resting = Resting(llm, seed=3)
        for parameters in ("greedy", "seeded", "greedy"):
            assert run(llm, parameters) == plain(parameters), parameters
    assert resting.num_drafted > 100


@pytest.mark.parametrize("name", ["eagle3", "mlp"])
def test_nothing_is_kept_while_all_rest(name: str, model: Path, folders: dict[str, Path]) -> None:
    with open_exact(model, {**HEADS[name], "model": str(folders[name])}) as llm:
        resting = Resting(llm, seed=1)

        def plan(requests: Sequence[DecodingSequence], load: StepLoad) -> DraftPlan:
            names = frozenset(resting.members)
            return DraftPlan(load=load, budgets=(0,) * len(requests), resting=names)

        llm._engine.parts.scheduler._plan_drafts = plan
        run(llm, "greedy")
        assert resting.features.slots_SF.isnan().all()


SHARED = {
    "draft": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": HEADS["eagle3"],
    "medusa": HEADS["medusa"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARED)
def test_drafters_have_what_the_target_leaves(
    name: str, model: Path, draft: Path, folders: dict[str, Path], plain: Any
) -> None:
    """As many tokens as without speculation, whose pages are all used; what drafters have written
    is given back for them, and the tokens stay the same."""
    folder = draft if name == "draft" else folders[name]
    config = {**SHARED[name], "model": str(folder)}
    with open_exact(model, None, **PRESSURES["shortage"]) as alone:
        num_tokens = alone._engine.parts.config.num_kv_tokens
    with open_exact(model, config, **PRESSURES["shortage"]) as llm:
        parts = llm._engine.parts
        pool, shared = parts.scheduler._pages.pool, parts.shared
        if shared is None:
            pytest.skip("this system takes no memory back")
        assert parts.config.num_kv_tokens == num_tokens == pool.capacity
        fullest, run_step = 0, parts.runner.run

        def watched(*args: Any, **named: Any) -> Any:
            nonlocal fullest
            parts.scheduler.check_integrity()
            fullest = max(fullest, pool.num_used)
            return run_step(*args, **named)

        parts.runner.run = watched  # type: ignore[method-assign]
        for parameters in ("greedy", "seeded", "greedy"):
            assert run(llm, parameters) == plain(parameters), parameters
        assert counted(llm, "num_draft_tokens") > 100
        assert fullest > 0.95 * pool.num_pages and shared.num_reclaimed > 0
