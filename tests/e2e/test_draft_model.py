"""The draft model's own KV: never a hole, never stale, whatever happened since the last draft."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.control.plan import DraftPlan, DraftPlanner
from foretoken.models import LoadOptions
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.models.draft_model.steps import ModelSteps
from foretoken.proposers.own_kv import KVProposer
from foretoken.proposers.progress import DraftLimits
from foretoken.runtime.draft_sampler import DraftSampler
from foretoken.runtime.runner import Runner
from foretoken.runtime.sampler import Sampler
from foretoken.testing import write_tiny_llama
from foretoken.v1.metrics.reader import Gauge
from tests.e2e.lossless import PRESSURES, VOCAB, make_prompts
from tests.unit.proposing import draft_model

PAGE_SIZE, PAGES = 8, 600


class Audited(Proposer):
    """Asks a proposer, and one that remembers nothing and computes everything anew."""

    name = "audited"

    def __init__(self, kept: KVProposer, fresh: Callable[[], KVProposer]) -> None:
        self._kept = kept
        self._fresh = fresh
        self.num_compared = 0

    def propose(self, context: Context) -> Draft:
        found = self._kept.propose(context)
        expected = self._fresh().propose(context)
        assert found.ids == expected.ids
        self.num_compared += sum(bool(ids) for ids in found.ids)
        return found

    def release(self, request_id: str) -> None:
        self._kept.release(request_id)


def make_proposer(folder: Path, generations: list[int]) -> KVProposer:
    options = LoadOptions(
        dtype=torch.float32, device=torch.device("cpu"), batch_invariant=True, page_size=PAGE_SIZE
    )
    runner = Runner.load(folder, options, num_pages=PAGES)
    sampler = DraftSampler(Sampler(VOCAB), "auto", "auto")
    limits = DraftLimits(max_model_len=256, max_num_batched_tokens=32)
    return draft_model(runner, sampler, generations, limits)


def audited(draft: Path, pool: Any) -> Audited:
    kept = make_proposer(draft, pool.generation)
    second = make_proposer(draft, pool.generation)
    steps, sampler = second.make_steps([]), second._sampler
    assert isinstance(steps, ModelSteps)
    limits = DraftLimits(max_model_len=256, max_num_batched_tokens=10_000)

    def fresh() -> KVProposer:
        return draft_model(steps.runner, sampler, pool.generation, limits)

    return Audited(kept, fresh)


@pytest.mark.parametrize("pressure", ["calm", "chunks", "shortage"])
def test_kept_kv_equals_kv_computed_anew(pressure: str, model: Path, draft: Path) -> None:
    """Partial and full acceptance, pauses, chunked prefill, preemption and prefix hits: at every
    step the drafts are those of a draft model that sees the whole sequence for the first time."""
    settings = {**PRESSURES[pressure], "block_size": PAGE_SIZE}
    with LLM(str(model), dtype="float32", batch_invariant=True, **settings) as llm:
        engine = llm._engine
        pool = engine.parts.scheduler._pages.pool
        assert pool.num_pages <= PAGES
        proposer = audited(draft, pool)
        object.__setattr__(engine.parts, "proposer", proposer)
        engine.parts.scheduler._plan_drafts = _alternating()
        for parameters in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 4}):
            params = SamplingParams(max_tokens=32, detokenize=False, **parameters)  # type: ignore[arg-type]
            llm.generate(make_prompts(9, 5), params, use_tqdm=False)
        assert proposer.num_compared > 100


def _alternating() -> DraftPlanner:
    """Budgets 5, 0, 0, 1, 3, ... so that the drafter pauses and catches up."""
    cycle = (5, 0, 0, 1, 3, 6, 0)
    calls = iter(range(10**9))
    return lambda requests, load: DraftPlan(
        load=load, drafts=tuple(cycle[next(calls) % len(cycle)] for _ in requests)
    )


@pytest.mark.parametrize("k", [1, 3, 6])
def test_a_draft_equal_to_the_target_is_always_accepted(k: int, model: Path) -> None:
    """After full acceptance the last draft has no KV yet; forgetting it would show here."""
    config = {"model": str(model), "num_speculative_tokens": k}
    settings: dict[str, Any] = {"dtype": "float32", "batch_invariant": True}
    llm = LLM(str(model), speculative_config=config, adaptive_speculation=False, **settings)
    params = SamplingParams(max_tokens=1 + 6 * (k + 1), temperature=0.0, detokenize=False)
    outputs = llm.generate(make_prompts(5, 6), params, use_tqdm=False)
    for request in outputs:
        metrics = request.outputs[0].metrics
        assert metrics is not None
        assert metrics.accepted_per_step == metrics.drafted_per_step
    [rate] = [m for m in llm.get_metrics() if m.name == "foretoken:draft_acceptance_rate"]
    assert isinstance(rate, Gauge)
    assert rate.value == 1.0


def test_a_draft_with_another_vocabulary_is_refused(model: Path, tmp_path: Path) -> None:
    from foretoken.errors import ConfigError

    other = write_tiny_llama(tmp_path / "other", vocab_size=101)
    with pytest.raises(ConfigError, match="101 tokens") as caught:
        LLM(str(model), speculative_config={"model": str(other)})
    assert caught.value.field == "speculative_config.model"
    assert "97" in caught.value.allowed


def test_mixed_rules_in_one_batch(model: Path, draft: Path) -> None:
    """Drawn and matched drafts of unequal length side by side: seeded requests stay identical."""
    config = {"model": str(draft), "num_speculative_tokens": 4}
    drawn = SamplingParams(max_tokens=9, temperature=0.9, detokenize=False)
    seeded = SamplingParams(max_tokens=24, temperature=0.9, seed=5, detokenize=False)
    prompts = make_prompts(8, 7)
    mixed = [drawn, seeded] * 4
    settings: dict[str, Any] = {"dtype": "float32", "batch_invariant": True}
    with LLM(str(model), **settings) as plain:
        expected = plain.generate(prompts, seeded, use_tqdm=False)
    with LLM(str(model), speculative_config=config, adaptive_speculation=False, **settings) as llm:
        found = llm.generate(prompts, mixed, use_tqdm=False)
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert len(one.outputs[0].token_ids) == mixed[i].max_tokens
        if i % 2:
            assert one.outputs[0].token_ids == other.outputs[0].token_ids
