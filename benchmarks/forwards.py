"""Bare forward passes, timed outside the engine's loop.

Owns a span of one sequence on the first pages of a runner's store; nothing else may use that
runner meanwhile. Times are seconds per pass, logits included, sampling excluded.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from foretoken import LLM
from foretoken.models.rollout import plan_best
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.models.draft_model.steps import ModelSteps
from foretoken.proposers.own_kv import KVProposer
from foretoken.runtime.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A runner whose first pages hold `context` random tokens."""

    runner: Runner
    context: int
    vocab: int

    def prefill(self) -> None:
        """Write the context's keys and values."""
        self._forward(0, self.context)

    def seconds(self, rows: int, times: int) -> float:
        """Mean time of a pass over `rows` tokens after the context, logits for each."""
        began = time.perf_counter()
        for _ in range(times):
            self._forward(self.context, rows)
        return (time.perf_counter() - began) / times

    def timer(self, rows: int, times: int) -> Callable[[], float]:
        """`seconds`, to be called later."""
        return lambda: self.seconds(rows, times)

    def drafting_seconds(self, fed: int, drafts: int, times: int) -> float:
        """Mean time of one call that feeds `fed` tokens after the context and drafts greedily."""
        layout, ids = self._span(self.context, fed, fed + drafts)
        plan = plan_best(1, drafts)
        began = time.perf_counter()
        for _ in range(times):
            found = self.runner.roll_out([layout], [ids], plan)
            assert found is not None, "no compiled kernels"
        return (time.perf_counter() - began) / times

    def chain_seconds(self, drafts: int, times: int) -> float:
        """Mean time of so many greedy drafts after the context, by one call where there is one."""
        layout, ids = self._span(self.context, 1, 1 + drafts)
        plan = plan_best(1, drafts)
        began = time.perf_counter()
        for _ in range(times):
            if self.runner.roll_out([layout], [ids], plan) is None:
                for at in range(drafts):
                    self._forward(self.context + at, 1).argmax(dim=-1).tolist()
        return (time.perf_counter() - began) / times

    def _forward(self, start: int, rows: int) -> Tensor:
        layout, ids = self._span(start, rows, rows)
        return self.runner.forward([layout], [ids], range(rows)).logits_RV

    def _span(self, start: int, rows: int, reach: int) -> tuple[SpanLayout, list[int]]:
        """Random tokens, on pages that hold `reach` positions from their first one on."""
        pages = list(range(-(-(start + reach) // self.runner.page_size)))
        layout = SpanLayout(start=start, num_tokens=rows, page_table=pages)
        return layout, random.Random(rows).choices(range(2, self.vocab), k=rows)


def target_probe(llm: LLM, context: int) -> Probe:
    """Over the target of an idle LLM."""
    parts = llm._engine.parts
    probe = Probe(runner=parts.runner, context=context, vocab=parts.vocab_size)
    probe.prefill()
    return probe


def draft_probe(llm: LLM, context: int) -> Probe:
    """Over the draft model of an idle LLM with method draft_model."""
    parts = llm._engine.parts
    assert isinstance(parts.proposer, Drafters), parts.proposer.name
    proposer = parts.proposer.members["draft_model"].proposer
    assert isinstance(proposer, KVProposer), proposer.name
    steps = proposer.make_steps([])
    assert isinstance(steps, ModelSteps), type(steps)
    probe = Probe(runner=steps.runner, context=context, vocab=parts.vocab_size)
    probe.prefill()
    return probe
